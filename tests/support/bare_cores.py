"""Fake cores that consist only of a ROUTER socket, one after another at one address, and a link to them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from octavo.frontend.link import CoreLink
from octavo.frontend.recovery.downtime import ReconnectPolicy
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.events import (
    EngineFacts,
    Event,
    Events,
    Welcome,
)
from octavo.protocol.requests import (
    Connect,
    FrontendMessage,
)

FACTS = EngineFacts(5, "path", ["name"], 100, 50, 16, 10, 8, 20, "float32", "cpu", b"")


class Cores:
    """Several cores at one address, one after another, of which one is alive."""

    def __init__(self, address: str) -> None:
        self.epoch = FACTS.epoch - 1
        self._address = address
        self._context = zmq.asyncio.Context()
        self._peer = b""
        self.frontend_ids: list[bytes] = []
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self._address)

    def die(self) -> None:
        self._socket.close(linger=0)

    async def welcome(self, replaced_epoch: int = 0) -> None:
        connect = await self.receive()
        assert isinstance(connect, Connect)
        self.frontend_ids.append(connect.frontend_id)
        await self.send(Welcome(msgspec.structs.replace(FACTS, epoch=self.epoch, replaced_epoch=replaced_epoch)))

    async def receive(self) -> FrontendMessage:
        self._peer, *frames = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        return request_codec().decode(*frames)

    async def send(self, event: Event) -> None:
        await self._socket.send_multipart([self._peer, *event_codec().encode(event)])

    async def events(self, *events: object, epoch: int | None = None) -> None:
        await self.send(Events(epoch or self.epoch, list(events)))

    def close(self) -> None:
        self._context.destroy(linger=0)


def run(
    tmp_path: Path,
    scenario: Callable[[Cores, CoreLink], Awaitable[None]],
    reconnect_policy: ReconnectPolicy = ReconnectPolicy(None),
) -> None:
    async def main() -> None:
        own = zmq.Context()
        cores = Cores(f"ipc://{tmp_path}/core")
        try:
            connecting = asyncio.create_task(CoreLink.connect(own, f"ipc://{tmp_path}/core", 10))
            await cores.welcome()
            link = await connecting
            link.reconnect_policy = reconnect_policy
            try:
                await asyncio.wait_for(scenario(cores, link), 20)
            finally:
                await link.close()
        finally:
            cores.close()
            own.term()

    asyncio.run(main())
