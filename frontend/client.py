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
    """A client of one engine, or of several engines of the same model. It belongs to one event loop.

    Create it with `launch` or `connect`; close it with `close` or `async with`.
    """

    def __init__(self, *connections: EngineConnection, indices: Several[int] | None = None) -> None:
        """Use the given engines; each of them may get any request.

        Args:
            connections: to the engines, which must serve the same model.
            indices: index of each engine, in the order of `connections`. Default: 0, 1, 2, ...
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
        """Start an engine that this client owns. Use `async with`, or await it and `close` it later.

        Args:
            model: directory, .gguf file or hub id. Leave it out if `config` is given.
            config: the complete engine configuration, instead of `model` and `settings`.
            address: `ipc://` address on which other applications can join the engine. `None`: a private address.
            on_progress: called with a phase and its progress (0 to 1) while the engine starts.
            allow_code: allow `logits_processors` to contain classes and functions, which the workers will run.
            otlp_traces_endpoint: URL of an OpenTelemetry collector that receives a span per request; needs
                octavo[otel].
            settings: any engine flag by its name: `max_num_seqs=8`.

        Raises:
            ConfigError: a setting is invalid; raised by the call itself or when the result is awaited.
            StartupError: the engine could not start. The error names the root cause. Raised when the result is awaited.
        """
        code = take_code(settings, is_allowed=allow_code)
        given = config or engine_config({"model": model, **settings})
        given = msgspec.structs.replace(given, processor_code=[*given.processor_code, *code])
        traces = traces_to(otlp_traces_endpoint)
        return Starting(lambda: cls._from_engines(launch_engines(given, address, on_progress), traces))

    @classmethod
    async def follow(
        cls, spawned: Several[SpawnedEngine], *, on_progress: ProgressCallback | None = None
    ) -> "AsyncClient":
        """Wait for engines that were spawned on this thread, and join them. The client owns them and stops them.

        Raises:
            StartupError: an engine could not start. The error names the root cause; all of the engines were stopped.
        """
        return await cls._from_engines(follow_engines(spawned, on_progress), None)

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
        """Join an engine that another process runs. Use the result in `async with`, or await it and `close` it later.

        Args:
            address: address of the engine. For several engines of the same model: their addresses, separated by commas.
            connect_timeout_s: seconds to wait for a response; the engine may still be loading or restarting.
            reconnect_timeout_s: seconds that requests wait, after the engine died, for another one at the same address.
                0: requests fail at once.
            client_secret_key_file: this client's secret key, for an engine on another machine (`octavo keygen`).
            engine_public_key_file: that engine's public key. Give both files or neither.
            otlp_traces_endpoint: as for `launch`.

        Raises:
            StartupError: no engine responds on `address`. Raised when the result is awaited.
            ConfigError: the address needs keys, only one key file was given, a key file cannot be read, or the engines
                serve different models.
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
        return Starting(lambda: cls._from_engines(joining(), traces))

    @classmethod
    async def _from_engines(
        cls, connecting: Awaitable[Several[EngineConnection]], traces: TraceObserver | None
    ) -> "AsyncClient":
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
        if engine is self.engine_set.primary and engine.config != self.config:
            self.on_model_changed()
        if self.observer:
            self.observer.on_restart(resumption.kind, resumption.num_requests, resumption.pause_s, engine.index)

    def on_model_changed(self) -> None:
        """See `EngineListener`. Live requests continue with the settings that they were prepared with."""
        primary = self.engine_set.primary
        self.config, self.tokenizer = primary.config, primary.tokenizer
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
