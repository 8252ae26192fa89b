"""`AsyncClient`: text in, text out, on engines that this process starts or joins."""

import asyncio
from collections.abc import Awaitable
from collections.abc import Sequence as Several
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from octavo.frontend.calls.trace_observer import TraceObserver, traces_to
from octavo.frontend.connected_engine import ConnectedEngine
from octavo.frontend.engine_connection import (
    CONNECT_TIMEOUT_S,
    RECONNECT_TIMEOUT_S,
    EngineConnection,
    follow_engines,
    join_engines,
    launch_engines,
)
from octavo.frontend.engine_set import EngineSet
from octavo.frontend.engine_state import EngineState
from octavo.frontend.engines_client import EnginesClient
from octavo.frontend.generation.client import GenerationClient
from octavo.frontend.generation.grammar_maker import GrammarMaker
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.generation.media import open_media
from octavo.frontend.generation.preparation import RequestPreparer
from octavo.frontend.launch import ProgressCallback
from octavo.frontend.live_weights import LiveWeights
from octavo.frontend.lora.registry import AdapterRegistry
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.pooling.client import PoolingClient
from octavo.frontend.pooling.pooler import Pooler
from octavo.frontend.recovery.downtime import Resumption
from octavo.frontend.routing.model_link import ModelLink
from octavo.frontend.spawn import SpawnedEngine
from octavo.frontend.starting import Starting
from octavo.frontend.text.threads import TextThreads
from octavo.frontend.weights_client import WeightsClient
from octavo.protocol.code import take_code
from octavo.protocol.config import EngineConfig
from octavo.protocol.config.sources import engine_config
from octavo.protocol.curve import read_client_keys

T = TypeVar("T")


class AsyncClient(GenerationClient, PoolingClient, WeightsClient, EnginesClient):
    """A client of one engine, for one event loop.

    Create it with `launch` or `connect`; close it with `close` or `async with`.
    """

    def __init__(self, *connections: EngineConnection, indices: Several[int] | None = None) -> None:
        """Use one engine, or several of the same model, each of which may get any request.

        Args:
            connections: to the engines.
            indices: of the engines; None: in order, from 0.
        """
        self._text = TextThreads()
        self._live = LiveRequests()
        self.media: PromptMaker | None = None
        self.tokenizer = connections[0].tokenizer
        first = dict(zip(range(len(connections)) if indices is None else indices, connections, strict=True))
        self.engine_set = EngineSet(first, self, self._live.has_users)
        self._weights = LiveWeights(self.engine_set)
        self._link = self.engine_set.link
        self.adapters = AdapterRegistry(lambda: self.config, self.run_in_thread)
        self.engine_set.set_states(dict.fromkeys(first, EngineState.SERVING))

    @classmethod
    def launch(
        cls,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        address: str | None = None,
        on_progress: ProgressCallback | None = None,
        allow_code: bool = False,
        otlp_traces_endpoint: str | None = None,
        **settings: Any,
    ) -> "Starting[AsyncClient]":
        """Start an engine that this client owns; use `async with`, or await it and `close` it later.

        Args:
            model: directory, .gguf file or hub id; or give a whole `config`.
            config: the engine's configuration, instead of `model` and `settings`.
            address: `ipc://` address on which other applications may join.
            on_progress: called with the engine's progress while it starts.
            allow_code: let `logits_processors` hold classes and functions besides names; workers run them.
            otlp_traces_endpoint: URL of an OpenTelemetry collector that gets the spans of requests; needs octavo[otel].
            settings: any engine flag by its name: `max_num_seqs=8`.

        Raises:
            StartupError: the root cause.
        """
        code = take_code(settings, is_allowed=allow_code)
        given = config or engine_config({"model": model, **settings})
        given = msgspec.structs.replace(given, processor_code=[*given.processor_code, *code])
        traces = traces_to(otlp_traces_endpoint)
        return Starting(lambda: cls._on(launch_engines(given, address, on_progress), traces))

    @classmethod
    async def follow(
        cls, spawned: Several[SpawnedEngine], *, on_progress: ProgressCallback | None = None
    ) -> "AsyncClient":
        """Wait for engines that were spawned on this thread, and join them; the client will end them.

        Raises:
            StartupError: the root cause; all of them have been ended.
        """
        return await cls._on(follow_engines(spawned, on_progress), None)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        client_secret_key_file: str | None = None,
        engine_public_key_file: str | None = None,
        otlp_traces_endpoint: str | None = None,
    ) -> "Starting[AsyncClient]":
        """Join an engine that another process runs; use `async with`, or await it and `close` it later.

        Args:
            address: of the engine; those of several engines of the same model are separated by commas.
            connect_timeout_s: how long to wait for it to answer; it may still be loading, or restarting.
            reconnect_timeout_s: if the engine dies, how long requests wait for another one at the same address; 0: they
                fail at once.
            client_secret_key_file: this client's key, for an engine on another machine (`octavo keygen`).
            engine_public_key_file: the key of that engine. Both files must be given.
            otlp_traces_endpoint: as for `launch`.

        Raises:
            StartupError: no engine answers on `address`.
            ConfigError: the address needs keys, one of two is missing, or they cannot be read; or the engines serve
                different models.
        """
        keys = read_client_keys(client_secret_key_file, engine_public_key_file)
        joining = partial(
            join_engines,
            address.split(","),
            reconnect_timeout_s=reconnect_timeout_s,
            keys=keys,
            connect_timeout_s=connect_timeout_s,
        )
        traces = traces_to(otlp_traces_endpoint)
        return Starting(lambda: cls._on(joining(), traces))

    @classmethod
    async def _on(cls, connecting: Awaitable[Several[EngineConnection]], traces: TraceObserver | None) -> "AsyncClient":
        return cls(*await connecting).traced_by(traces)

    async def close(self) -> None:
        """Abort live requests, disconnect, and stop the engine if we started it. Idempotent."""
        try:
            await self._link.close()
            if self.media is not None:
                await self.media.close()
            await asyncio.gather(*(engine.close() for engine in self.engines))
        finally:
            self._text.close()
            await self.close_traces()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _on_media_query(self, is_hit: bool) -> None:
        if self.observer:
            self.observer.on_media_query(is_hit=is_hit)

    def on_resumed(self, engine: ConnectedEngine, resumption: Resumption) -> None:
        """See `EngineListener`."""
        if engine is self.engine_set.lead and engine.config != self.config:
            self.on_model_changed()
        if self.observer:
            self.observer.on_restart(resumption.kind, resumption.num_requests, resumption.pause_s, engine.index)

    def on_model_changed(self) -> None:
        """See `EngineListener`. Live requests go on as they were prepared."""
        lead = self.engine_set.lead
        self.config, self.tokenizer = lead.config, lead.tokenizer
        link = ModelLink(self._link, self._link.identity)
        grammars = GrammarMaker(link, self.tokenizer, self.config, self.run_in_thread)
        if self.media is None and self.config.media is not None:
            self.media = open_media(self.config, self.tokenize, self._on_media_query)
        self.preparer = RequestPreparer(
            link,
            self.tokenizer,
            self.config,
            grammars,
            self.tokenize,
            self._live,
            self.media,
            self.adapters.of_media,
        )
        self.pooler = Pooler(
            link, self.tokenizer, self.config, self._text, self._live, self.preparer.check_priority, self.media
        )
