"""`ConnectedEngine`: one engine of a client, with its pulse, its supervisor and its health."""

from collections.abc import Callable
from functools import partial

import msgspec

from octavo.frontend.engine_connection import EngineConnection
from octavo.frontend.engine_state import EngineState
from octavo.frontend.health import STALL_DEADLINE_S, EngineReport, Health, check_health, pulse_of
from octavo.frontend.launch import LaunchedEngine
from octavo.frontend.recovery.downtime import Resumption
from octavo.frontend.recovery.engine_supervisor import EngineSupervisor
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import StartupError
from octavo.protocol.events import EngineFacts
from octavo.protocol.supervise import ChildExited


class ConnectedEngine:
    """An engine that this process has started or joined. If we started it, its core is restarted after a failure.

    Args:
        index: index of the engine, unique among the engines of the client.
        connection: to the engine. Closed here.
        on_resumed: called when another core has taken over.
        is_needed: returns whether any engine of the client is busy. If engines run their steps in lockstep, each of
            them must then be alive, even without requests of its own.
        on_given_up: called with the cause when the engine has ended for good without being stopped.
    """

    def __init__(
        self,
        index: int,
        connection: EngineConnection,
        on_resumed: Callable[["ConnectedEngine", Resumption], None],
        is_needed: Callable[[], bool],
        on_given_up: Callable[["ConnectedEngine", str], None],
    ) -> None:
        self.index = index
        self.state = EngineState.STARTING
        self.link = connection.link
        self.tokenizer = connection.tokenizer
        self.config = _config_of(connection.link.facts)
        self._connection = connection
        self._on_resumed = on_resumed
        self._is_needed = is_needed
        self._pulse = pulse_of(self.link.facts)
        self.link.on_resumed = self._resume
        self._supervisor: EngineSupervisor | None = None
        if connection.engine and self.config.recovery.restart_core:
            self._supervisor = EngineSupervisor(
                connection.engine,
                self.link,
                self.config.recovery.core_timeout,
                self._has_work,
                partial(on_given_up, self),
            )
            connection.engine.watch(self._supervisor.on_exit)
        elif connection.engine:
            connection.engine.watch(partial(self._on_exit, on_given_up))

    @property
    def process(self) -> LaunchedEngine | None:
        """The engine's process, if we started it; otherwise `None`."""
        return self._connection.engine

    @property
    def is_busy(self) -> bool:
        """Whether the engine owes a reply to this client, or has work for another client."""
        return self.link.expects_answer or (self._pulse is not None and self._pulse.read().has_work)

    def pin_engine(self) -> None:
        """Accept only this engine after a reconnect, even if another engine has taken over its address.

        Other applications follow the address; a client with several engines already has a link to the other one.
        """
        self.link.accepts = lambda facts: _config_of(facts).engine_index == self.config.engine_index

    def health(self, deadline_s: float) -> Health:
        """Return whether the engine is alive and makes progress; see `check_health`."""
        return check_health(self.link, self._pulse, self.link.busy_since_s, deadline_s)

    def report(self, deadline_s: float = STALL_DEADLINE_S) -> EngineReport:
        """Return the engine's state, as operators see it."""
        health = self.health(deadline_s)
        state = self.state.value
        if self.state is EngineState.SERVING:
            state = "up" if health.ok else "down"
        return EngineReport(self.index, state, health.reason)

    async def replace(self, config: ResolvedConfig) -> None:
        """Start a core with another configuration while the present one runs, and switch over; live requests continue.

        Raises:
            StartupError: we did not start this engine; or the new core could not start, and the old one continues.
        """
        if self.process is None:
            raise StartupError("this client did not start its engine", hint="restart it in its own process")
        await self.process.replace(config)
        self.link.lose("it is being replaced, as requested", "planned")

    async def close(self) -> None:
        """Disconnect, and stop the engine if we started it. Idempotent."""
        try:
            if self._supervisor:
                await self._supervisor.close()
            await self._connection.close()
        finally:
            if self._pulse:
                self._pulse.close()
                self._pulse = None

    def give_up(self, cause: str) -> None:
        """Fail all requests, and kill the core if it is ours: the engine cannot compute anything any more."""
        self.link.fail(cause)
        if self.process:
            self.process.kill()

    def _on_exit(self, on_given_up: Callable[["ConnectedEngine", str], None], exited: ChildExited) -> None:
        """Handle the exit of a core that is not restarted."""
        cause = self.link.last_words or str(exited)
        self.link.fail(cause)
        if exited.code:  # exit code 0: the core was told to stop
            on_given_up(self, cause)

    def _resume(self, resumption: Resumption) -> None:
        """Switch to the pulse and the configuration of the core that has taken over."""
        self.config = _config_of(self.link.facts)
        if self._pulse:
            self._pulse.close()
        self._pulse = pulse_of(self.link.facts)
        self._on_resumed(self, resumption)

    def _has_work(self) -> bool:
        return self.is_busy or (self.config.is_lock_step and self._is_needed())


def _config_of(facts: EngineFacts) -> ResolvedConfig:
    return msgspec.msgpack.decode(facts.config, type=ResolvedConfig)
