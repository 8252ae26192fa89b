"""`EngineSet`: the engines of one client. They join, drain and leave while it serves."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from octavo.frontend.connected_engine import ConnectedEngine
from octavo.frontend.engine_connection import EngineConnection
from octavo.frontend.engine_state import EngineState
from octavo.frontend.health import Health
from octavo.frontend.recovery.downtime import Resumption
from octavo.frontend.routing.routed_link import RoutedLink
from octavo.frontend.routing.router import PrefixRouter
from octavo.frontend.spawn import config_of_engine
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import StartupError
from octavo.protocol.prefix_hash import span_blocks
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_ENGINES = 256
"""Engines of one client at a time: each has an index below this."""


class EngineListener(Protocol):
    """What an `EngineSet` reports to its client."""

    def on_stats(self, engine: int, stats: EngineStats) -> None:
        """An engine has reported its counters."""

    def on_resumed(self, engine: ConnectedEngine, resumption: Resumption) -> None:
        """Another core of an engine has taken over."""

    def on_model_changed(self) -> None:
        """Engines with other weights or settings serve now."""


class EngineSet:
    """Engines by index, each in a state. Nobody else adds links to `link`.

    Args:
        connections: to the first engines. One of them at least must be made to serve.
        listener: the client.
        has_users: whether requests live that were prepared for an identity, even if no engine has one at the moment.
    """

    def __init__(
        self,
        connections: Mapping[int, EngineConnection],
        listener: EngineListener,
        has_users: Callable[[str], bool],
    ) -> None:
        self._engines: dict[int, ConnectedEngine] = {}
        self._listener = listener
        self._has_users = has_users
        self._lead: ConnectedEngine | None = None
        first = next(iter(connections.values()))
        self._router = PrefixRouter(MAX_ENGINES, 1, first.link.facts.block_size)
        self.link = RoutedLink(self._router, listener.on_model_changed)
        for index, connection in connections.items():
            self.add(index, connection)

    def __contains__(self, index: object) -> bool:
        return index in self._engines

    def __getitem__(self, index: int) -> ConnectedEngine:
        return self._engines[index]

    @property
    def all(self) -> list[ConnectedEngine]:
        """Every engine, by index."""
        return [self._engines[index] for index in sorted(self._engines)]

    @property
    def lead(self) -> ConnectedEngine:
        """The first engine that serves: its configuration is that of the client."""
        serving = [engine for engine in self.all if engine.state is EngineState.SERVING]
        own = [engine for engine in serving if engine.link.facts.identity == self.link.identity]
        return (own or serving or self.all)[0]

    def add(self, index: int, connection: EngineConnection) -> ConnectedEngine:
        """Add an engine; it gets no requests until `set_states` says so. It is closed by `remove` or `close`."""
        engine = self._engines[index] = ConnectedEngine(
            index,
            connection,
            self._listener.on_resumed,
            lambda: any(one.is_busy for one in self.all),
            self._on_given_up,
        )
        engine.link.on_stats = partial(self._listener.on_stats, index)
        transfer = engine.config.kv_transfer
        self.link.add(index, engine.link, None if transfer is None else transfer.role)
        num_spans = [one.link.facts.num_blocks // span_blocks(one.config.block_size) for one in self._engines.values()]
        self._router.max_spans = max(1, sum(num_spans))  # at least as many as the caches hold
        return engine

    def _on_given_up(self, engine: ConnectedEngine, cause: str) -> None:
        """Give up the engines that cannot compute without this one, as all divide the experts of the model."""
        if not engine.config.is_lock_step:
            return
        for other in self.all:
            if other is not engine and not other.link.failure:
                other.give_up(f"engine {engine.index}, which has a part of the experts, was given up: {cause}")

    def set_states(self, states: Mapping[int, EngineState]) -> None:
        """Change states of engines, all at once: new requests go to those that serve.

        Raises:
            IllegalTransition: an engine cannot get into its state.
        """
        for index, state in states.items():
            engine = self._engines[index]
            if state is not engine.state:
                engine.state = engine.state.move(state)
        lead = self._lead
        self.link.serve([engine.index for engine in self.all if engine.state is EngineState.SERVING])
        self._lead = self.lead
        if self._lead is not lead:
            self._listener.on_model_changed()

    def is_idle(self, index: int) -> bool:
        """Return whether no request of this client needs an engine any more."""
        engine = self._engines[index]
        if engine.link.num_live_requests:
            return False
        identity = engine.link.facts.identity
        others = [one for one in self.all if one is not engine and one.link.facts.identity == identity]
        # A beam search has no live request between two steps, and must go on with the same weights.
        return bool(others) or not self._has_users(identity)

    def move_requests(self, indices: Collection[int]) -> None:
        """Move the requests of engines that drain to those that serve and compute the same bits, if there are any."""
        for index in indices:
            self.link.move_away(index)

    async def replace(self, config: ResolvedConfig) -> None:
        """Replace the cores of all engines, one after another; live requests continue on the new ones.

        Raises:
            StartupError: a new core cannot start, and the old one continues.
        """
        replaced: list[int] = []
        for engine in self.all:
            try:
                await engine.replace(config_of_engine(config, engine.index, engine.config.engine_place))
            except StartupError as error:
                if replaced:
                    error.args = (f"{error}; engines {', '.join(map(str, replaced))} were replaced before",)
                    error.message = str(error)
                raise
            replaced.append(engine.index)

    async def remove(self, index: int) -> None:
        """Disconnect from an idle engine that does not serve, and stop it if it is ours."""
        engine = self._engines[index]
        engine.state = engine.state.move(EngineState.REMOVED)
        self.link.remove(index)
        del self._engines[index]
        self._listener.on_stats(index, EngineStats())  # the next engine of this index counts from 0
        await engine.close()

    def health(self, deadline_s: float) -> dict[int, Health]:
        """Return the health of each engine, by index."""
        return {engine.index: engine.health(deadline_s) for engine in self.all}
