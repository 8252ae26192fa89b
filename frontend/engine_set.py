"""`EngineSet`: the engines of one client. They join, drain and leave while it serves."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from octavo.frontend.connected_engine import ConnectedEngine
from octavo.frontend.engine_configs import config_of_engine
from octavo.frontend.engine_connection import EngineConnection
from octavo.frontend.engine_state import EngineState
from octavo.frontend.health import Health
from octavo.frontend.recovery.downtime import Resumption
from octavo.frontend.routing.routed_link import RoutedLink
from octavo.frontend.routing.router import PrefixRouter
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import StartupError
from octavo.protocol.prefix_hash import span_blocks
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

MAX_ENGINES = 256
"""Maximum number of engines of one client; also the upper bound (exclusive) of their indices."""


class EngineListener(Protocol):
    """Notifications of an `EngineSet` to its client."""

    def on_stats(self, engine: int, stats: EngineStats) -> None:
        """Handle a report of an engine's counters."""

    def on_resumed(self, engine: ConnectedEngine, resumption: Resumption) -> None:
        """Handle the takeover by another core of an engine."""

    def on_model_changed(self) -> None:
        """Handle a change of the weights or settings of the serving engines."""


class EngineSet:
    """The engines of a client by index, each in a state. Only this class adds links to `link`.

    Args:
        connections: to the first engines. The caller must set at least one of them to serving.
        listener: the client.
        has_users: returns whether work is live that was prepared for an engine identity, even if no engine has a
            request of it at the moment.
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
        """All engines, sorted by index."""
        return [self._engines[index] for index in sorted(self._engines)]

    @property
    def primary(self) -> ConnectedEngine:
        """The first serving engine; the client uses its configuration."""
        serving = [engine for engine in self.all if engine.state is EngineState.SERVING]
        own = [engine for engine in serving if engine.link.facts.identity == self.link.identity]
        return (own or serving or self.all)[0]

    def add(self, index: int, connection: EngineConnection) -> ConnectedEngine:
        """Add an engine. It gets no requests until `set_states` makes it serve. It is closed by `remove` or by the
        client.
        """
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
        """Give up all other engines of a lockstep group: each of them holds a part of the experts."""
        if not engine.config.is_lock_step:
            return
        for other in self.all:
            if other is not engine and not other.link.failure:
                other.give_up(f"engine {engine.index}, which has a part of the experts, was given up: {cause}")

    def set_states(self, states: Mapping[int, EngineState]) -> None:
        """Change the states of engines, all at once: new requests go to the serving engines.

        Raises:
            IllegalTransition: an engine cannot change from its state to the given one.
        """
        for index, state in states.items():
            engine = self._engines[index]
            if state is not engine.state:
                engine.state = engine.state.move(state)
        previous = self._lead
        self.link.serve([engine.index for engine in self.all if engine.state is EngineState.SERVING])
        self._lead = self.primary
        if self._lead is not previous:
            self._listener.on_model_changed()

    def is_idle(self, index: int) -> bool:
        """Return whether no request of this client needs the engine any more."""
        engine = self._engines[index]
        if engine.link.num_live_requests:
            return False
        identity = engine.link.facts.identity
        others = [one for one in self.all if one is not engine and one.link.facts.identity == identity]
        # A beam search has no live request between two steps, and must continue with the same weights.
        return bool(others) or not self._has_users(identity)

    def move_requests(self, indices: Collection[int]) -> None:
        """Move the requests of draining engines to serving engines that compute the same bits, if there are any."""
        for index in indices:
            self.link.move_away(index)

    async def replace(self, config: ResolvedConfig) -> None:
        """Replace the cores of all engines, one after another; live requests continue on the new cores.

        Raises:
            StartupError: a new core could not start, and the old one continues. The message lists the engines that were
                already replaced.
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
        """Disconnect from an idle engine that does not serve; stop it if we started it."""
        engine = self._engines[index]
        engine.state = engine.state.move(EngineState.REMOVED)
        self.link.remove(index)
        del self._engines[index]
        self._listener.on_stats(index, EngineStats())  # the next engine with this index counts from 0
        await engine.close()

    def health(self, deadline_s: float) -> dict[int, Health]:
        """Return the health of each engine, by index."""
        return {engine.index: engine.health(deadline_s) for engine in self.all}
