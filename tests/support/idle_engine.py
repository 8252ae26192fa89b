"""A real client and link whose core never replies, to measure the memory and work of the frontend alone."""

from collections.abc import Sequence

import msgspec
from fake_client import byte_tokenizer, engine_facts, resolved_config

from octavo.frontend.client import AsyncClient
from octavo.frontend.engine_connection import EngineConnection
from octavo.frontend.link import CoreLink
from octavo.protocol.codec import Frame, request_codec
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.events import Events, RequestEvent
from octavo.protocol.requests import FrontendMessage, Submit

VOCAB_SIZE = 50_000
"""So large that most token ids are separate integer objects."""

MAX_MODEL_LEN = 10**6


class IdleWire:
    """Counts sent messages, except aborts, and keeps them only on request."""

    fault = ""

    def __init__(self) -> None:
        self.keeps = False
        self.sent: list[FrontendMessage] = []
        self.num_sent = 0
        self._codec = request_codec()

    def send(self, frames: list[Frame]) -> None:
        self.num_sent += 1
        if self.keeps:
            self.sent.append(self._codec.decode(*frames))

    def abort(self, request_ids: Sequence[str]) -> None:
        pass

    async def drain(self) -> None:
        pass

    def close(self, linger_ms: int | None = None) -> None:
        pass


class IdleLink(CoreLink):
    """Made and used while an event loop runs."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(None, "nowhere")  # type: ignore[arg-type]
        encoded = msgspec.msgpack.encode(config)
        self.facts = engine_facts(
            config.served_model_names, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, config=encoded
        )

    @property
    def wire(self) -> IdleWire:
        assert isinstance(self._wire, IdleWire)
        return self._wire

    @property
    def submitted(self) -> list[Submit]:
        return [request for request in self.wire.sent if isinstance(request, Submit)]

    def receive(self, events: list[RequestEvent]) -> None:
        for _ in self._receive(Events(1, events)) or ():
            pass

    def _open_wire(self) -> IdleWire:  # type: ignore[override]
        return IdleWire()


def idle_client() -> tuple[AsyncClient, IdleLink]:
    """Return a client and its link; close the client with `shut`."""
    config = resolved_config(max_num_queued_reqs=0)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, vocab_size=VOCAB_SIZE))
    link = IdleLink(config)
    return AsyncClient(EngineConnection(link, byte_tokenizer(), None, None)), link  # type: ignore[arg-type]


def shut(client: AsyncClient) -> None:
    """Stop the threads of a client without closing sockets that it does not have."""
    client._text.close()
