"""Runs a scenario: the life of one or several engines in one thread, on a virtual clock, determined by its seed.

The core's loop, service, outbox, scheduler, cache and grammars are real, and so are all messages. Sockets, processes,
time and the model are simulated. Every failure is reproducible with its seed.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from octavo.core_proc.scheduler import step_target
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import Finished
from simulation.callers import WrongAnswer
from simulation.engine import SimulatedEngine
from simulation.files import SimulatedFiles
from simulation.frontend import Connection, SimulatedFrontend, SimulatedWire
from simulation.scenario import Ask, Fault, Scenario
from simulation.world import World

MIN_MEASURED_TOKENS = 3
"""Steps of the simulation are small, and their times decide too what is copied and what is computed."""

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
    num_moved: int
    """Requests that moved to another engine, each as often as it did."""
    num_overloaded: int
    """Rejections by a full queue; the callers retried."""
    num_events: int
    num_steps: int
    num_preemptions: int
    num_cached_tokens: int
    num_loaded_tokens: int
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
        self._is_shutting_down = False
        self._world = World(EVENTS_PER_REQUEST * (len(scenario.asks) + 10 * len(scenario.faults) + 20))
        self._rng = random.Random(f"run {scenario.seed}")
        self._counters: Counter[str] = Counter()
        files = SimulatedFiles(scenario.seed, scenario.num_ranks, scenario.max_files)
        self._engines = [
            SimulatedEngine(index, scenario, self._world, self._rng, self._count_death, files, is_observed=is_observed)
            for index in range(scenario.num_engines)
        ]
        for engine in self._engines:
            engine.on_exit = partial(self._on_core_exit, engine)
        by_frontend: list[list[Ask]] = [[] for _ in range(scenario.num_frontends)]
        for ask in scenario.asks:
            by_frontend[ask.frontend].append(ask)
        self._frontends = [self._frontend(asks) for asks in by_frontend]
        self._dead_frontends: list[SimulatedFrontend] = []
        for fault in scenario.faults:
            self._world.at(fault.time, lambda fault=fault: self._happen(fault))
        if scenario.drains:
            self._world.at(max((ask.time for ask in scenario.asks), default=0.0), self._drain)

    def run(self) -> Report:
        """Run all events and check the results.

        Raises:
            AssertionError: a check failed. The engine may also raise other errors.
        """
        self._world.run()
        self._check_callers()
        for engine in self._engines:
            engine.check()
        cores = [core for engine in self._engines for core in engine.cores]
        callers = [caller for frontend in self._all_frontends() for caller in frontend.callers.values()]
        stats = [core.scheduler.stats() for core in cores]
        num_answers = sum(isinstance(caller.end, Finished) for caller in callers)
        return Report(
            num_answers=num_answers,
            num_left=sum(caller.end is None for caller in callers),
            num_guilty=sum(caller.is_blamed and caller.is_poisoned for caller in callers),
            num_blamed=sum(caller.is_blamed and not caller.is_poisoned for caller in callers),
            num_moved=sum(port.link.num_adopted for frontend in self._all_frontends() for port in frontend.ports),
            num_overloaded=sum(caller.num_rejections for caller in callers),
            num_events=self._world.num_events,
            num_steps=sum(one.num_steps for one in stats),
            num_preemptions=sum(one.num_preemptions for one in stats),
            num_cached_tokens=sum(one.prefix_cache_hits for one in stats),
            num_loaded_tokens=sum(one.external_prefix_cache_hits for one in stats),
            num_core_lives=len(cores),
            num_worker_lives=sum(core.num_groups for core in cores),
            faults=self._counters,
        )

    def soon(self, callback: Callable[..., object], *arguments: Any, context: object = None) -> None:
        """Take the place of `call_soon` of the event loop."""
        self._world.soon(lambda: callback(*arguments))

    def _all_frontends(self) -> list[SimulatedFrontend]:
        return self._frontends + self._dead_frontends

    def _frontend(self, asks: list[Ask]) -> SimulatedFrontend:
        engines = [(partial(self._dial, engine), engine.hang_up) for engine in self._engines]
        return SimulatedFrontend(self._world, asks, self._engines[0].core.plan, engines, self._scenario.step_scale)

    def _dial(self, engine: SimulatedEngine, wire: SimulatedWire) -> Connection | None:
        connection = engine.dial(wire)
        if connection is None and engine.is_shutting_down:
            self._tell_shutdown(engine)
        return connection

    def _happen(self, fault: Fault) -> None:
        """Inject a fault."""
        frontend = self._frontends[fault.target]
        has_effect = True
        match fault.kind:
            case "kill frontend":
                self._kill_frontend(fault)
            case "stop frontend":
                frontend.stop(fault.duration)
            case "cut connection":
                has_effect = sum(self._cut(engine, frontend) for engine in self._hit_by(fault)) > 0
            case "take engine out" | "empty engine":
                self._take_out(fault)
            case _:
                has_effect = sum(engine.suffer(fault) for engine in self._hit_by(fault)) > 0
        self._counters[fault.kind] += has_effect

    def _hit_by(self, fault: Fault) -> list[SimulatedEngine]:
        return self._engines if fault.engine is None else [self._engines[fault.engine]]

    def _cut(self, engine: SimulatedEngine, frontend: SimulatedFrontend) -> bool:
        """Break the connection of a frontend to an engine; False if there is none."""
        wire = frontend.ports[engine.index].wire
        if wire.connection is None:
            return False
        wire.connection.to_core.cut()
        engine.hang_up(wire.connection)
        self._notice(engine, frontend, wire, 10 * self._scenario.delay_scale * self._rng.random())
        return True

    def _take_out(self, fault: Fault) -> None:
        """Have all frontends send nothing to an engine for a while; they hear of it one after another."""
        assert fault.engine is not None
        for frontend in self._frontends:
            delay = self._scenario.delay_scale * self._rng.random()
            take_out = partial(frontend.take_out, fault.engine, fault.duration, moves=fault.kind == "empty engine")
            frontend.after(delay, take_out)

    def _kill_frontend(self, fault: Fault) -> None:
        """Replace a frontend by a new one, which takes over the callers that have not started yet."""
        frontend, scenario = self._frontends[fault.target], self._scenario
        frontend.kill()
        self._dead_frontends.append(frontend)
        for engine, port in zip(self._engines, frontend.ports, strict=True):
            if port.wire.connection is not None:
                engine.hang_up(port.wire.connection)  # what it had sent before still arrives
        asks = [ask for ask in scenario.asks if ask.frontend == fault.target and ask.time > self._world.now]
        for ask in asks:
            frontend.callers.pop(ask.submit.request_id, None)
        self._frontends[fault.target] = self._frontend(asks)

    def _notice(self, engine: SimulatedEngine, frontend: SimulatedFrontend, wire: SimulatedWire, delay: float) -> None:
        """Let a frontend notice, after a while, that its connection has broken."""

        def lose() -> None:
            if wire.has_unread:
                frontend.after(0.0, lose)
                return
            engine.check_farewell(wire, frontend.stopped_until, READING_S)
            wire.lose()
            if engine.is_shutting_down and not engine.core.is_alive:
                self._tell_shutdown(engine)

        # In two steps: messages that arrive at the same moment are read first, however many slices they take.
        self._world.after(delay, lambda: frontend.after(0.0, lose))

    def _on_core_exit(self, engine: SimulatedEngine) -> None:
        """Let the frontends notice the end of a core."""
        for frontend in self._frontends:
            wire = frontend.ports[engine.index].wire
            if wire.connection is not None and wire.connection.core is engine.core:
                # Messages that were sent before still arrive, then the disconnect.
                self._notice(engine, frontend, wire, wire.connection.from_core.latest - self._world.now)

    def _count_death(self, engine: SimulatedEngine, by_poison: bool) -> None:
        """Count the death of a core or its workers. If a request did not cause it, one may still be suspected."""
        if by_poison:
            return
        for frontend in self._frontends:
            link = frontend.ports[engine.index].link
            for caller in frontend.callers.values():
                is_there = len(self._engines) == 1 or link.link_of.get(caller.name) is link
                caller.num_deaths += caller.stream is not None and is_there

    def _drain(self) -> None:
        self._is_shutting_down = True
        for engine in self._engines:
            if not engine.drain():
                self._tell_shutdown(engine)

    def _tell_shutdown(self, engine: SimulatedEngine) -> None:
        """Tell frontends that wait for another core that the engine was shut down."""
        for frontend in self._frontends:
            port = frontend.ports[engine.index]
            connection = port.wire.connection
            if connection is None or connection.core is not engine.core:
                frontend.after(0.0, port.hear_of_shutdown)

    def _check_callers(self) -> None:
        for frontend in self._frontends:
            for caller in frontend.callers.values():
                if caller.is_waiting:
                    raise WrongAnswer(f"request {caller.name} never ended")
                if isinstance(caller.end, EngineDeadError) and not self._is_shutting_down:
                    raise WrongAnswer(f"request {caller.name}: {caller.end}")
            for engine, port in zip(self._engines, frontend.ports, strict=True):
                wire = port.wire
                if engine.core.is_alive and not wire.is_closed and (wire.live or wire.calls):
                    raise WrongAnswer(f"the core forgot {sorted(wire.live)[:5]}, or calls {wire.calls}")


def run_scenario(scenario: Scenario, *, is_observed: bool) -> Report:
    """Run a scenario.

    Raises:
        AssertionError: something is wrong; which may also be any other error that the engine raised.
    """

    async def live() -> Report:
        simulation = Simulation(scenario, is_observed=is_observed)
        loop: Any = asyncio.get_running_loop()
        loop.call_soon, call_soon = simulation.soon, loop.call_soon
        try:
            return simulation.run()
        finally:
            loop.call_soon = call_soon

    # Links make futures and callbacks, for which a loop must be there; it waits for nothing, the clock is the world's.
    with patch.object(step_target, "MIN_MEASURED_TOKENS", MIN_MEASURED_TOKENS):
        return asyncio.run(live())
