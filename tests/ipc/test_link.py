"""The frontend's socket to the core, against a core made of a bare ROUTER."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from octavo.frontend.connection import connect_to_core
from octavo.frontend.link import CoreLink
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.channel import MAX_FRAME_BYTES
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    StartupError,
)
from octavo.protocol.events import (
    BoolResult,
    CallFailed,
    EngineDying,
    EngineFacts,
    Event,
    Events,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Refused,
    Reply,
    StatsReport,
    Tokens,
    Welcome,
)
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Abort, Call, Connect, Request, ResetPrefixCache, Submit
from octavo.protocol.stats import EngineStats

EPOCH = 5
FACTS = EngineFacts(EPOCH, "path", ["name"], 100, 50, 16, 10, 8, 20, "float32", "cpu", b"")
SUBMIT = Submit("r", [1, 2], SamplingSpec(max_tokens=4, seed=0))


class FakeCore:
    """Answers nothing by itself but `Connect`."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.peer = b""

    async def receive(self) -> Request:
        self.peer, frame = await asyncio.wait_for(self.socket.recv_multipart(), 10)
        return request_codec().decode(frame)

    async def send(self, event: Event) -> None:
        await self.socket.send_multipart([self.peer, event_codec().encode(event)])

    async def events(self, *events: object, epoch: int = EPOCH) -> None:
        await self.send(Events(epoch, list(events)))


def run(tmp_path: Path, scenario: Callable[[FakeCore, CoreLink], Awaitable[None]], answer: Event | None = None) -> None:
    """Connect a link to a fake core and play a scenario."""

    async def main() -> None:
        context, own = zmq.asyncio.Context(), zmq.Context()
        core = FakeCore(context, f"ipc://{tmp_path}/core")
        connecting = asyncio.create_task(CoreLink.connect(own, f"ipc://{tmp_path}/core", 10))
        try:
            assert isinstance(await core.receive(), Connect)
            await core.send(answer or Welcome(FACTS))
            link = await connecting
            try:
                await asyncio.wait_for(scenario(core, link), 20)
            finally:
                await link.close()
        finally:
            core.socket.close(linger=0)
            context.term()
            own.term()

    asyncio.run(main())


async def take(stream: RequestStream, arrived: asyncio.Event) -> list:
    await asyncio.wait_for(arrived.wait(), 10)
    arrived.clear()
    return stream.take()


def test_a_request_and_its_events(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        assert await core.receive() == SUBMIT
        await core.events(Tokens("r", [7]), Tokens("other", [9]))
        assert await take(stream, arrived) == [Tokens("r", [7])]
        await core.events(Tokens("r", [8]))
        await core.events(Tokens("r", [9]), Finished("r", FinishReason.STOP))
        while not stream.is_over:
            await asyncio.sleep(0.01)
        assert await take(stream, arrived) == [
            Tokens("r", [8]),
            Tokens("r", [9]),
            Finished("r", FinishReason.STOP),
        ]
        assert link.num_live_requests == 0

    run(tmp_path, scenario)


def test_events_of_an_older_engine_are_ignored(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.events(Tokens("r", [7]), epoch=EPOCH - 1)
        await core.events(Tokens("r", [8]))
        assert await take(stream, arrived) == [Tokens("r", [8])]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.INVALID, InvalidRequestError),
        (FailureKind.OVERLOADED, OverloadedError),
        (FailureKind.INTERNAL, RequestFailedError),
    ],
)
def test_a_failure_comes_after_the_tokens_before_it(tmp_path: Path, kind: FailureKind, error: type[Exception]) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.events(Tokens("r", [7]), Failed("r", kind, "because"))
        assert await take(stream, arrived) == [Tokens("r", [7])]
        with pytest.raises(error, match="because"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_abort_reaches_the_core_once_and_silences_the_stream(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        link.submit(SUBMIT, arrived)
        await core.receive()
        link.abort(["r", "unknown"])
        link.abort(["r"])
        assert await core.receive() == Abort(["r"])
        await core.events(Tokens("r", [7]))
        await core.send(StatsReport(EngineStats(num_running=3)))
        while link.latest_stats.num_running != 3:
            await asyncio.sleep(0.01)
        assert not arrived.is_set()

    run(tmp_path, scenario)


def test_closing_aborts_what_runs(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await link.close()
        assert await core.receive() == Abort(["r"])
        with pytest.raises(EngineDeadError, match="closed"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_closing_twice_at_once(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        await asyncio.gather(link.close(), link.close(), link.close())
        assert link.failure is not None
        assert link.num_live_requests == 0

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "bad",
    [
        {"priority": 2**70},
        {"priority": 1.5},
        {"cache_salt": "\ud800"},
        {"cache_salt": 5},
        {"prompt_token_ids": [2**64]},
        {"cache_salt": "x" * MAX_FRAME_BYTES},
    ],
    ids=["out of range", "a float", "half a surrogate pair", "a number", "a huge token", "too long a message"],
)
def test_what_the_core_could_not_read_is_refused_and_harms_nobody(tmp_path: Path, bad: dict[str, object]) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        with pytest.raises(InvalidRequestError):
            link.submit(msgspec.structs.replace(SUBMIT, **bad), asyncio.Event())
        assert link.num_live_requests == 0
        link.submit(SUBMIT, asyncio.Event())
        assert await core.receive() == SUBMIT

    run(tmp_path, scenario)


def test_a_loop_that_breaks_ends_every_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        def on_stats(stats: EngineStats) -> None:
            raise ZeroDivisionError("in the caller's code")

        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        link.on_stats = on_stats
        await core.send(StatsReport(EngineStats()))
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_a_core_that_gave_this_frontend_up_ends_every_request(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.send(Refused("connect first"))
        with pytest.raises(EngineDeadError, match="connect first"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_two_live_requests_of_one_id_are_refused(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        link.submit(SUBMIT, asyncio.Event())
        with pytest.raises(InvalidRequestError, match="in use"):
            link.submit(SUBMIT, asyncio.Event())

    run(tmp_path, scenario)


def test_utility_calls(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        for result in (BoolResult(True), EngineStats(num_steps=4)):
            calling = asyncio.create_task(link.call(ResetPrefixCache()))
            call = await core.receive()
            assert isinstance(call, Call)
            await core.send(Reply(call.call_id, result))
            assert await calling == result
        calling = asyncio.create_task(link.call(ResetPrefixCache()))
        call = await core.receive()
        await core.send(Reply(call.call_id, CallFailed("no such thing")))
        with pytest.raises(RequestFailedError, match="no such thing"):
            await calling
        with pytest.raises(RequestFailedError, match="did not answer"):
            await link.call(ResetPrefixCache(), timeout_s=0.05)

    run(tmp_path, scenario)


def test_a_core_that_vanishes_ends_every_request(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        calling = asyncio.create_task(link.call(ResetPrefixCache()))
        await core.receive()
        core.socket.close(linger=0)
        with pytest.raises(EngineDeadError, match="gone"):
            await take(stream, arrived)
        with pytest.raises(EngineDeadError):
            await calling
        with pytest.raises(EngineDeadError):
            link.submit(SUBMIT, arrived)

    run(tmp_path, scenario)


def test_a_dying_core_names_the_cause(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        arrived = asyncio.Event()
        stream = link.submit(SUBMIT, arrived)
        await core.receive()
        await core.send(EngineDying("worker 0 was ended by SIGKILL"))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await take(stream, arrived)

    run(tmp_path, scenario)


def test_another_protocol_version_is_refused(tmp_path: Path) -> None:
    async def scenario(core: FakeCore, link: CoreLink) -> None:
        raise AssertionError("connected")

    with pytest.raises(StartupError, match="version 9"):
        run(tmp_path, scenario, answer=Refused("this engine speaks version 9"))


def test_an_engine_that_still_loads_is_told_from_none(tmp_path: Path) -> None:
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


def test_nobody_answers(tmp_path: Path) -> None:
    async def main() -> None:
        context = zmq.Context()
        try:
            with pytest.raises(StartupError, match="no engine answers"):
                await CoreLink.connect(context, f"ipc://{tmp_path}/nobody", timeout_s=0.2)
        finally:
            context.term()

    asyncio.run(main())


def test_a_core_that_dies_before_it_answers_is_one_between_two_lives(tmp_path: Path) -> None:
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


def test_a_core_that_dies_in_the_handshake_is_one_between_two_lives(tmp_path: Path) -> None:
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
