"""`EnginesClient`: the methods of `AsyncClient` that report on its engines and replace them."""

import asyncio
from typing import Self

from octavo.frontend.calls.trace_observer import TraceObserver
from octavo.frontend.connected_engine import ConnectedEngine
from octavo.frontend.engine_configs import read_config
from octavo.frontend.engine_connection import model_tokenizer
from octavo.frontend.engine_set import EngineSet
from octavo.frontend.engine_state import EngineState
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.health import STALL_DEADLINE_S, EngineReport, Health
from octavo.frontend.launch import LaunchedEngine
from octavo.frontend.metrics.observer import Observer
from octavo.frontend.recovery.replacement import require_same_number, require_same_tokens
from octavo.frontend.text.threads import TextThreads
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import EngineConfig, ResolvedConfig
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import BoolResult, EngineFacts
from octavo.protocol.requests import GetSnapshot, GetStats, ResetPrefixCache, StartProfile, StopProfile, Utility
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.stats import EngineStats


class EnginesClient:
    """Mixin of `AsyncClient`."""

    config: ResolvedConfig
    """Configuration of the first serving engine."""
    tokenizer: Tokenizer
    """Tokenizer of that engine's model."""
    _live: LiveRequests
    _text: TextThreads
    engine_set: EngineSet
    """The engines; `octavo admin` adds, drains and removes them."""

    _traces: TraceObserver | None = None

    @property
    def observer(self) -> Observer | None:
        """Receives latencies and finished requests, for the metrics."""
        return self._live.observer if self._traces is None else self._traces.next

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        if self._traces is None:
            self._live.observer = observer
        else:
            self._traces.next = observer

    def traced_by(self, traces: TraceObserver | None) -> Self:
        """Trace the requests of this client from now on; return the client."""
        if traces is not None:
            traces.model = self.config.served_model_names[0]
            self._traces = self._live.observer = traces
        return self

    async def close_traces(self) -> None:
        """Send the remaining spans."""
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    @property
    def facts(self) -> EngineFacts:
        """What the engine reported about itself when it was joined."""
        return self.engine_set.link.facts

    @property
    def address(self) -> str:
        """Address at which other applications can `connect`."""
        return self.engine_set.link.address

    @property
    def engine(self) -> LaunchedEngine | None:
        """The process of the first engine, if this client has launched it. `None` after `connect`."""
        return self.engines[0].process

    @property
    def engines(self) -> list[ConnectedEngine]:
        """All engines, by index."""
        return self.engine_set.all

    def facts_by_engine(self) -> dict[int, EngineFacts]:
        """Return what each engine last reported about itself, by index."""
        return {engine.index: engine.link.facts for engine in self.engines}

    def stats_by_engine(self) -> dict[int, EngineStats]:
        """Return the latest counters of each engine, by index."""
        return {engine.index: engine.link.latest_stats for engine in self.engines}

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no request can be served any more. `None` while an engine lives."""
        return self.engine_set.link.failure

    @property
    def num_lost_requests(self) -> int:
        """Number of live requests that failed because their engine died."""
        return self.engine_set.link.num_lost_requests

    @property
    def latest_stats(self) -> EngineStats:
        """The latest reported counters, at most about a second old while the engine works."""
        return self.engine_set.link.latest_stats

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return `False`, and drop nothing, if blocks are in use."""
        return await self._call_bool(ResetPrefixCache())

    async def start_profile(self, directory: str) -> bool:
        """Start the torch profiler on every worker; traces are written to `directory` on the worker's machine."""
        return await self._call_bool(StartProfile(directory))

    async def stop_profile(self) -> bool:
        """Stop the profiler and write one trace per worker."""
        return await self._call_bool(StopProfile())

    async def engine_stats(self) -> EngineStats:
        """Return the current counters; asks the engine."""
        result = await self.engine_set.link.call(GetStats())
        assert isinstance(result, EngineStats)
        return result

    async def snapshot(self, engine: int | None = None) -> EngineSnapshot:
        """Return the requests, blocks and latest steps of an engine; by default, of the first serving engine."""
        shown = self.engine_set.primary if engine is None else self.engine_set[engine]
        result = await shown.link.call(GetSnapshot())
        assert isinstance(result, EngineSnapshot)
        return result

    def health(self, deadline_s: float = STALL_DEADLINE_S) -> Health:
        """Return the health of the client without sending a message: healthy if any serving engine is.

        Args:
            deadline_s: seconds that an engine may have work without finishing a step or accepting a request.
        """
        states = [engine.health(deadline_s) for engine in self.engines if engine.state is EngineState.SERVING]
        return next((state for state in states if state.ok), states[0])

    def engine_reports(self, deadline_s: float = STALL_DEADLINE_S) -> list[EngineReport]:
        """Return the state of each engine, including engines that start or drain."""
        return [engine.report(deadline_s) for engine in self.engines]

    async def restart(self, config: EngineConfig) -> None:
        """Replace all engines, one after another, with another configuration or reloaded weights; live requests
        continue.

        The new core starts while the old one runs, and takes over when it is ready. Requests pause for a moment and
        continue on the new core. Memory must be large enough for both.

        Args:
            config: configuration of the new engines; their model must have the same tokenizer.

        Raises:
            StartupError: a new core could not start, with the root cause. The old core continues. The message lists
                the engines that were already replaced.
            ConfigError: the configuration is invalid, or its model has other tokens.
        """
        resolved = await asyncio.to_thread(read_config, config)
        if self.engine:
            require_same_number(self.config, resolved)
        tokenizer = await asyncio.to_thread(model_tokenizer, resolved.model)
        await self._text.run(lambda: require_same_tokens(self.config, self.tokenizer, resolved, tokenizer))
        await self.engine_set.replace(resolved)

    async def _call_bool(self, utility: Utility) -> bool:
        result = await self.engine_set.link.call(utility)
        assert isinstance(result, BoolResult)
        return result.ok

    def on_stats(self, engine: int, stats: EngineStats) -> None:
        """See `EngineListener`."""
        if self.observer:
            self.observer.on_engine_stats(stats, engine)
