"""Runs a scenario: the whole life of one engine in one thread, on a virtual clock, determined by its seed.

The core's loop, service, outbox, scheduler, cache and grammars are real, and so are all messages. Sockets, processes,
time and the model are simulated. Every failure is reproducible with its seed.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import Finished
from simulation.callers import WrongAnswer
from simulation.core import SimulatedCore
from simulation.frontend import Connection, SimulatedFrontend, SimulatedWire
from simulation.scenario import Ask, Fault, Scenario
from simulation.world import Pipe, World

READING_S = 0.5
"""A frontend that has run for this long has read all messages."""

EVENTS_PER_REQUEST = 1000
"""A run with more events than this does not terminate."""


@dataclass(frozen=True)
class Report:
    """The counters of a run without errors."""

    num_answers: int
    """Requests that ended with the correct answer."""
    num_left: int
    """Requests whose callers left, or whose frontend died."""
    num_guilty: int
    """Requests that kept killing cores or workers, and failed for that reason."""
    num_blamed: int
    """Requests that failed because they were in flight each time something else killed a process."""
    num_overloaded: int
    """Rejections by a full queue; the callers retried."""
    num_events: int
    num_steps: int
    num_preemptions: int
    num_cached_tokens: int
    num_core_lives: int
    num_worker_lives: int
    faults: Counter[str]
    """Faults of each kind that hit a live process."""


class Simulation:
    """One run.

    Args:
        scenario: everything that happens in it.
        is_observed: check all invariants of the scheduler after each call, and replay its calls at the end.
    """

    def __init__(self, scenario: Scenario, *, is_observed: bool) -> None:
        self._scenario = scenario
        self._is_observed = is_observed
        self._world = World(EVENTS_PER_REQUEST * (len(scenario.asks) + 10 * len(scenario.faults) + 20))
        self._rng = random.Random(f"run {scenario.seed}")
        self._cores: list[SimulatedCore] = []
        self._counters: Counter[str] = Counter()
        self._num_connections = 0
        self._restart_delay = 0.0
        self._is_shutting_down = False
        self._start_core()
        by_frontend: list[list[Ask]] = [[] for _ in range(scenario.num_frontends)]
        for ask in scenario.asks:
            by_frontend[ask.frontend].append(ask)
        self._frontends = [self._frontend(asks) for asks in by_frontend]
        self._dead_frontends: list[SimulatedFrontend] = []
        for fault in scenario.faults:
            self._world.at(fault.time, lambda fault=fault: self._happen(fault))
        if scenario.drains:
            self._world.at(max((ask.time for ask in scenario.asks), default=0.0), self._drain)

    @property
    def _core(self) -> SimulatedCore:
        """The latest core, alive or dead."""
        return self._cores[-1]

    def run(self) -> Report:
        """Run all events and check the results.

        Raises:
            AssertionError: a check failed. The engine may also raise other errors.
        """
        self._world.run()
        self._check_callers()
        self._check_core()
        callers = [caller for frontend in self._all_frontends() for caller in frontend.callers.values()]
        stats = [core.scheduler.stats() for core in self._cores]
        num_answers = sum(isinstance(caller.end, Finished) for caller in callers)
        return Report(
            num_answers=num_answers,
            num_left=sum(caller.end is None for caller in callers),
            num_guilty=sum(caller.is_blamed and caller.is_poisoned for caller in callers),
            num_blamed=sum(caller.is_blamed and not caller.is_poisoned for caller in callers),
            num_overloaded=sum(caller.num_rejections for caller in callers),
            num_events=self._world.num_events,
            num_steps=sum(one.num_steps for one in stats),
            num_preemptions=sum(one.num_preemptions for one in stats),
            num_cached_tokens=sum(one.prefix_cache_hits for one in stats),
            num_core_lives=len(self._cores),
            num_worker_lives=sum(core.num_groups for core in self._cores),
            faults=self._counters,
        )

    def _all_frontends(self) -> list[SimulatedFrontend]:
        return self._frontends + self._dead_frontends

    def _start_core(self) -> None:
        epoch, scenario = len(self._cores) + 1, self._scenario
        core = SimulatedCore(
            self._world,
            random.Random(f"core {scenario.seed} {epoch}"),
            scenario.engine,
            scenario.num_blocks,
            epoch,
            scenario.step_scale,
            scenario.max_backlog_events,
            self._cores[-1] if self._cores else None,
            is_observed=self._is_observed,
        )
        core.on_exit = lambda: self._on_core_exit(core)
        core.on_loss = lambda: self._count_death(by_poison=core.group.has_met_poison)
        self._cores.append(core)

    def _frontend(self, asks: list[Ask]) -> SimulatedFrontend:
        retry_s = self._scenario.step_scale
        return SimulatedFrontend(self._world, asks, self._core.plan, self._dial, self._hang_up, retry_s)

    def _dial(self, wire: SimulatedWire) -> Connection | None:
        """Connect a frontend to the live core."""
        core, scenario = self._core, self._scenario
        if not core.is_alive:
            if self._is_shutting_down:
                self._tell_shutdown()
            return None
        self._num_connections += 1
        rng = random.Random(f"pipe {scenario.seed} {self._num_connections}")
        peer = self._num_connections.to_bytes(4, "little")
        scale = scenario.delay_scale
        from_core = Pipe(self._world, rng, scale, scenario.queue_limit, wire.note_arrival)
        to_core = Pipe(self._world, rng, scale, 2**31, lambda: core.router.note_arrival(peer, to_core))
        core.router.attach(peer, from_core)
        return Connection(peer, core, from_core, to_core)

    def _hang_up(self, connection: Connection) -> None:
        """Close a connection of a frontend: the core notices after a while."""
        connection.from_core.cut()
        delay = 10 * self._scenario.delay_scale * self._rng.random()
        self._world.after(delay, lambda: connection.core.router.detach(connection.peer))

    def _happen(self, fault: Fault) -> None:
        """Inject a fault."""
        frontend, core = self._frontends[fault.target], self._core
        wire = frontend.wire
        match fault.kind:
            case "kill frontend":
                self._kill_frontend(fault)
            case "cut connection" if wire.connection is not None:
                wire.connection.to_core.cut()
                self._hang_up(wire.connection)
                self._notice(frontend, wire, 10 * self._scenario.delay_scale * self._rng.random())
            case "kill core" if core.is_alive:
                self._restart_delay = fault.duration
                core.kill_after(fault.num_operations)
            case "kill worker" if core.group.process.is_alive:
                core.group.die()
            case "fail worker":
                core.group.raises_next = True
            case "stop frontend":
                frontend.stop(fault.duration)
            case "stop core":
                core.stop(fault.duration)
            case "stop worker":
                core.group.process.stop(fault.duration)
            case _:
                return
        self._counters[fault.kind] += 1

    def _kill_frontend(self, fault: Fault) -> None:
        """Replace a frontend by a new one, which takes over the callers that have not started yet."""
        frontend, scenario = self._frontends[fault.target], self._scenario
        frontend.kill()
        self._dead_frontends.append(frontend)
        if frontend.wire.connection is not None:
            self._hang_up(frontend.wire.connection)  # what it had sent before still arrives
        asks = [ask for ask in scenario.asks if ask.frontend == fault.target and ask.time > self._world.now]
        for ask in asks:
            frontend.callers.pop(ask.submit.request_id, None)
        self._frontends[fault.target] = self._frontend(asks)

    def _notice(self, frontend: SimulatedFrontend, wire: SimulatedWire, delay: float) -> None:
        """Let a frontend notice, after a while, that its connection has broken."""

        def lose() -> None:
            self._check_farewell(frontend, wire)
            wire.lose()
            if self._is_shutting_down and not self._core.is_alive:
                self._tell_shutdown()

        # In two steps: messages that arrive at the same moment are read first.
        self._world.after(delay, lambda: frontend.after(0.0, lose))

    def _check_farewell(self, frontend: SimulatedFrontend, wire: SimulatedWire) -> None:
        """Check that a core that has ended in order has sent everything to frontends that read."""
        connection = wire.connection
        if connection is None or wire.is_closed or connection.to_core.is_cut:
            return
        reads = not frontend.stopped_until or frontend.stopped_until + READING_S < connection.core.ended_at
        if connection.core.has_said_goodbye and reads and wire.owed:
            raise WrongAnswer(f"the core has ended and owes {wire.owed[:5]}")

    def _on_core_exit(self, core: SimulatedCore) -> None:
        """Handle the end of the core: its frontends notice, and it restarts unless it was told to stop."""
        self._count_death(by_poison=core.has_met_poison)
        for frontend in self._frontends:
            connection = frontend.wire.connection
            if connection is not None and connection.core is core:
                # Messages that were sent before still arrive, then the disconnect.
                self._notice(frontend, frontend.wire, connection.from_core.latest - self._world.now)
        if not self._is_shutting_down:
            self._world.after(self._restart_delay, self._start_core)

    def _count_death(self, *, by_poison: bool) -> None:
        """Count the death of a core or its workers. If a request did not cause it, one may still be suspected."""
        if by_poison:
            return
        for frontend in self._frontends:
            for caller in frontend.callers.values():
                caller.num_deaths += caller.stream is not None

    def _drain(self) -> None:
        self._is_shutting_down = True
        core = self._core
        if not core.is_alive:
            self._tell_shutdown()
            return
        core.drain()

    def _tell_shutdown(self) -> None:
        """Tell frontends that wait for another core that the engine was shut down."""
        for frontend in self._frontends:
            connection = frontend.wire.connection
            if connection is None or connection.core is not self._core:
                frontend.after(0.0, frontend.hear_of_shutdown)

    def _check_callers(self) -> None:
        for frontend in self._frontends:
            for caller in frontend.callers.values():
                if caller.is_waiting:
                    raise WrongAnswer(f"request {caller.name} never ended")
                if isinstance(caller.end, EngineDeadError) and not self._is_shutting_down:
                    raise WrongAnswer(f"request {caller.name}: {caller.end}")
            wire = frontend.wire
            if self._core.is_alive and not wire.is_closed and (wire.live or wire.calls):
                raise WrongAnswer(f"the core forgot {sorted(wire.live)[:5]}, or calls {wire.calls}")

    def _check_core(self) -> None:
        """Check that the last core holds no requests, and that the recordings of all cores can be replayed."""
        core = self._core
        scheduler = core.scheduler
        if core.is_alive:
            assert not scheduler.requests and not scheduler.in_flight, "requests or steps are left"
            assert not scheduler.waiting.first and not scheduler.running.first, "a queue is not empty"
            assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks, "blocks are not free"
            assert len(scheduler.free_slots) == core.config.max_num_seqs, "slots are not free"
            assert not core.grammars.num_waiting, "requests wait for their grammars"
            assert not core.outbox.has_backlog, "events are not sent"
        if self._is_observed:
            for one in self._cores:
                one.check_replay()


def run_scenario(scenario: Scenario, *, is_observed: bool) -> Report:
    """Run a scenario.

    Raises:
        AssertionError: something is wrong; which may also be any other error that the engine raised.
    """

    async def live() -> Report:
        return Simulation(scenario, is_observed=is_observed).run()

    # Links make futures, for which a loop must be there; nothing waits for them, and the clock is the world's.
    return asyncio.run(live())
