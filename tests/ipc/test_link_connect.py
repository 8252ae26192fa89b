"""Connecting to a core: versions, engines that still load, cores that die in the handshake."""

import asyncio
import socket
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from core_links import FACTS, SUBMIT, FakeCore, run, take

from octavo.frontend.engine_connection import connect_to_core
from octavo.frontend.link import CoreLink
from octavo.protocol.errors import (
    StartupError,
)
from octavo.protocol.events import (
    Refused,
    Tokens,
    Welcome,
)
from octavo.protocol.requests import Connect


def test_another_protocol_version_is_rejected(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        raise AssertionError("connected")

    with pytest.raises(StartupError, match="version 9"):
        run(tmp_path, scenario, answer=Refused("this engine speaks version 9"))


def test_an_engine_that_is_loading_is_distinguished_from_none(tmp_path: Path) -> None:
    async def main() -> None:
        context = zmq.Context()
        # A core binds its sockets at once, and reads them when it is ready.
        loading = context.socket(zmq.ROUTER)
        loading.bind(f"ipc://{tmp_path}/core")
        try:
            with pytest.raises(StartupError, match="is not ready: it still loads"):
                await CoreLink.connect(context, f"ipc://{tmp_path}/core", timeout_s=0.5)
        finally:
            loading.close(linger=0)
            context.term()

    asyncio.run(main())


def test_connecting_without_an_engine_times_out(tmp_path: Path) -> None:
    async def main() -> None:
        context = zmq.Context()
        try:
            with pytest.raises(StartupError, match="no engine answers"):
                await CoreLink.connect(context, f"ipc://{tmp_path}/nobody", timeout_s=0.2)
        finally:
            context.term()

    asyncio.run(main())


def test_a_core_that_dies_before_it_answers_is_waited_for(tmp_path: Path) -> None:
    """Found by `octavo bench chaos`: an HTTP process that was replaced while the core was, too, died of it."""

    async def main() -> None:
        context, own = zmq.asyncio.Context(), zmq.Context()
        address = f"ipc://{tmp_path}/core"
        first = FakeCore(context, address)
        connecting = asyncio.create_task(connect_to_core(own, address, 10, None))
        assert isinstance(await first.receive(), Connect)
        first.socket.close(linger=0)
        second = FakeCore(context, address)
        try:
            assert isinstance(await second.receive(), Connect)
            await second.send(Welcome(FACTS))
            link = await connecting
            assert link.facts == FACTS
            await link.close()
        finally:
            second.socket.close(linger=0)
            context.term()
            own.term()

    asyncio.run(main())


def test_a_core_that_dies_in_the_handshake_is_waited_for(tmp_path: Path) -> None:
    """Found by `octavo bench chaos`: a core that was stopped, and then killed, was taken for one that wants keys."""

    async def main() -> None:
        context, own = zmq.asyncio.Context(), zmq.Context()
        stopped = socket.socket(socket.AF_UNIX)
        stopped.bind(f"{tmp_path}/core")
        stopped.listen()
        stopped.setblocking(False)
        connecting = asyncio.create_task(connect_to_core(own, f"ipc://{tmp_path}/core", 10, None))
        caller, _ = await asyncio.get_running_loop().sock_accept(stopped)
        stopped.close()
        caller.close()
        await asyncio.sleep(0.3)
        core = FakeCore(context, f"ipc://{tmp_path}/core")
        try:
            assert isinstance(await core.receive(), Connect)
            await core.send(Welcome(FACTS))
            await (await connecting).close()
        finally:
            core.socket.close(linger=0)
            context.term()
            own.term()

    asyncio.run(main())


def test_garbage_from_the_core_is_dropped(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.socket.send_multipart([core.peer, b"\x02", b"\xc1"])
        await core.events(Tokens("r", [7]))
        assert await take(stream, arrived) == [Tokens("r", [7])]

    run(tmp_path, scenario)


def test_a_connect_that_is_given_up_leaves_no_socket(tmp_path: Path) -> None:
    async def main() -> None:
        context = zmq.Context()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await CoreLink.connect(context, f"ipc://{tmp_path}/nobody", timeout_s=20)
        context.term()  # would wait for an open socket for ever

    asyncio.run(main())


@pytest.mark.parametrize("address", ["nonsense", f"ipc:///{'long' * 50}"])
def test_an_address_that_is_none(address: str) -> None:
    async def main() -> None:
        context = zmq.Context()
        with pytest.raises(StartupError, match="cannot connect"):
            await CoreLink.connect(context, address, timeout_s=20)
        context.term()

    asyncio.run(main())
