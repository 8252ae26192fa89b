"""A fake core that consists only of its socket, for tests of the frontend's link."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq
import zmq.asyncio

from octavo.frontend.link import CoreLink
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.events import (
    EngineFacts,
    Event,
    Events,
    Welcome,
)
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Connect, FrontendMessage, Submit

EPOCH = 5
FACTS = EngineFacts(EPOCH, "path", ["name"], 100, 50, 16, 10, 8, 20, "float32", "cpu", b"")
SUBMIT = Submit("r", pack_ids([1, 2]), SamplingSpec(max_tokens=4, seed=0))


class FakeCore:
    """Replies only to `Connect` by itself."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.peer = b""

    async def receive(self) -> FrontendMessage:
        self.peer, *frames = await asyncio.wait_for(self.socket.recv_multipart(), 10)
        return request_codec().decode(*frames)

    async def send(self, event: Event) -> None:
        await self.socket.send_multipart([self.peer, *event_codec().encode(event)])

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
