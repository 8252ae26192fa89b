"""One engine of a run: its cores, one after another, and the connections to them."""

import random
from collections.abc import Callable

from simulation.callers import WrongAnswer
from simulation.core import SimulatedCore
from simulation.files import SimulatedFiles
from simulation.frontend import Connection, SimulatedWire
from simulation.scenario import Fault, Scenario
from simulation.world import Action, Pipe, World


class SimulatedEngine:
    """Restarts its core when it dies.

    Args:
        index: index of the engine.
        scenario: scenario of the run.
        world: the clock.
        rng: draws delays.
        on_death: called with this engine when its core or its workers have died; whether a request killed them.
        files: files of KV blocks, which engines share.
        is_observed: see `Simulation`.
    """

    def __init__(
        self,
        index: int,
        scenario: Scenario,
        world: World,
        rng: random.Random,
        on_death: "Callable[[SimulatedEngine, bool], None]",
        files: SimulatedFiles,
        *,
        is_observed: bool,
    ) -> None:
        self.index = index
        self.cores: list[SimulatedCore] = []
        self.on_exit: Action = lambda: None
        """Called when a core has died, after `on_death`."""
        self.is_shutting_down = False
        self._scenario = scenario
        self._world = world
        self._rng = rng
        self._on_death = on_death
        self._files = files
        self._is_observed = is_observed
        self._name = f"{scenario.seed} of engine {index}" if index else str(scenario.seed)
        self._num_connections = 0
        self._restart_delay = 0.0
        self._start_core()

    @property
    def core(self) -> SimulatedCore:
        """The latest core, alive or dead."""
        return self.cores[-1]

    def dial(self, wire: SimulatedWire) -> Connection | None:
        """Connect a frontend to the live core."""
        core, scenario = self.core, self._scenario
        if not core.is_alive:
            return None
        self._num_connections += 1
        rng = random.Random(f"pipe {self._name} {self._num_connections}")
        peer = self._num_connections.to_bytes(4, "little")
        scale = scenario.delay_scale
        from_core = Pipe(self._world, rng, scale, scenario.queue_limit, wire.note_arrival)
        to_core = Pipe(self._world, rng, scale, 2**31, lambda: core.router.note_arrival(peer, to_core))
        core.router.attach(peer, from_core)
        return Connection(peer, core, from_core, to_core)

    def hang_up(self, connection: Connection) -> None:
        """Close a connection of a frontend: the core notices after a while."""
        connection.from_core.cut()
        delay = 10 * self._scenario.delay_scale * self._rng.random()
        self._world.after(delay, lambda: connection.core.router.detach(connection.peer))

    def suffer(self, fault: Fault) -> bool:
        """Inject a fault into the core or a worker; False if it is dead already."""
        core = self.core
        match fault.kind:
            case "kill core" if core.is_alive:
                self._restart_delay = fault.duration
                core.kill_after(fault.num_operations)
            case "kill worker" if core.group.is_alive(fault.rank):
                core.group.die(fault.rank)
            case "fail worker":
                core.group.raise_next(fault.rank)
            case "stop core":
                core.stop(fault.duration)
            case "stop worker":
                core.group.suspend(fault.duration, fault.rank)
            case _:
                return False
        return True

    def drain(self) -> bool:
        """Tell the core to stop; False if there is none."""
        self.is_shutting_down = True
        if self.core.is_alive:
            self.core.drain()
        return self.core.is_alive

    def check_farewell(self, wire: SimulatedWire, stopped_until: float, reading_s: float) -> None:
        """Check that a core that has ended in order has sent everything to frontends that read."""
        connection = wire.connection
        if connection is None or wire.is_closed or connection.to_core.is_cut:
            return
        reads = not stopped_until or stopped_until + reading_s < connection.core.ended_at
        if connection.core.has_said_goodbye and reads and wire.owed:
            raise WrongAnswer(f"the core has ended and owes {wire.owed[:5]}")

    def check(self) -> None:
        """Check that the last core holds no requests, and that the recordings of all cores can be replayed."""
        core = self.core
        scheduler = core.scheduler
        if core.is_alive:
            assert not scheduler.requests and not scheduler.in_flight, "requests or steps are left"
            assert not scheduler.waiting.first and not scheduler.running.first, "a queue is not empty"
            for pool in scheduler.cache.pools:
                assert pool.num_free == pool.num_blocks, "blocks are not free"
            assert len(scheduler.free_slots) == core.config.max_num_seqs, "slots are not free"
            assert not core.grammars.num_waiting, "requests wait for their grammars"
            assert not core.outbox.has_backlog, "events are not sent"
        if self._is_observed:
            for one in self.cores:
                one.check_replay()

    def _start_core(self) -> None:
        epoch, scenario = len(self.cores) + 1, self._scenario
        core = SimulatedCore(
            self._world,
            random.Random(f"core {self._name} {epoch}"),
            scenario.engine,
            scenario.num_blocks,
            scenario.groups,
            epoch,
            scenario.step_scale,
            scenario.max_backlog_events,
            self.cores[-1] if self.cores else None,
            files=self._files,
            host_block_s=scenario.host_block_s,
            num_ranks=scenario.num_ranks,
            is_observed=self._is_observed,
        )
        core.on_exit = lambda: self._on_core_exit(core)
        core.on_loss = lambda: self._on_death(self, core.group.has_met_poison)
        self.cores.append(core)

    def _on_core_exit(self, core: SimulatedCore) -> None:
        """Handle the end of the core: its frontends notice, and it restarts unless it was told to stop."""
        self._on_death(self, core.has_met_poison)
        self.on_exit()
        if not self.is_shutting_down:
            self._world.after(self._restart_delay, self._start_core)
