"""A group of several ranks in the simulation: each is a virtual process that starts, computes, raises, hangs and dies.

Start, commands and replies of the group are the real ones (`StartingGroup`); processes and sockets are simulated. The
ranks of a stage wait for one another in every step, as in an exchange of rows: none of them ends a step that another
has not begun. A pipeline stage begins a step when the stage before it has ended it.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.core_proc.workers.group import WorkerFailed
from octavo.core_proc.workers.starting import StartingGroup
from octavo.protocol.codec import Frame, worker_command_codec, worker_reply_codec
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.control import ControlMessage, Progress, WorkerReady
from octavo.protocol.errors import StartupError
from octavo.protocol.lifecycle import StartupReporter
from octavo.protocol.steps import StepPlan, StepResult, TokenMasks
from octavo.protocol.worker_commands import (
    AllocateCache,
    BlocksLoaded,
    CacheReady,
    CommandFailed,
    LoadBlocks,
    StoreBlocks,
    WarmedUp,
    WarmUp,
    WorkerCommand,
    WorkerReply,
)
from simulation.files import SimulatedFiles
from simulation.scenario import POISON_MARK
from simulation.worker import SimulatedWorker, facts_of, require
from simulation.world import Action, Process, World

COMMANDS, REPLIES = worker_command_codec(), worker_reply_codec()


class RankedGroup(StartingGroup):
    """Several ranks; see `SimulatedGroup` for the arguments.

    Args:
        num_ranks: how many.
    """

    waitables = ()

    def __init__(
        self,
        world: World,
        rng: random.Random,
        config: ResolvedConfig,
        plan: CachePlan,
        step_scale: float,
        on_event: Action,
        on_operation: Action,
        start_s: float,
        make_next: "Callable[[], RankedGroup]",
        files: SimulatedFiles,
        num_ranks: int,
    ) -> None:
        commands: Any = SimulatedPublisher(self, on_operation)
        self.replies: Any = SimulatedReplies(self)
        config = msgspec.structs.replace(config, world_size=num_ranks)
        self.config = config
        super().__init__(config, commands, self.replies)
        self.world, self.rng, self.step_scale, self.on_event = world, rng, step_scale, on_event
        self.is_instant = start_s == 0.0
        """True during the first start of an engine, which takes no time."""
        self.restart = make_next
        self.has_met_poison = False
        """True if a request killed it."""
        self.results: dict[int, bytes] = {}
        """The result of each step, by the number of its command, from the rank that computed it first."""
        self.num_in_flight = 0
        """Steps that were sent and whose result the core has not read."""
        sizes = plan.num_blocks, plan.cache_groups, plan.num_host_blocks
        self.files = files
        workers = [SimulatedWorker(config, *sizes, files=own) for own in files.ranks]
        self.ranks = [SimulatedRank(self, rank, worker) for rank, worker in enumerate(workers)]
        for rank in self.ranks:
            rank.start(start_s * rng.uniform(0.5, 1.0))

    def start_at_once(self, plan: CachePlan) -> None:
        """Do all of the first start."""
        require(any(self.advance(plan) for _ in range(3)), "the first start takes time")
        self.is_instant = False

    def join_steps(self) -> None:
        """No other engine needs these workers."""

    @property
    def has_events(self) -> bool:
        """True when `gather` has something to return."""
        return self.replies.has_messages

    @property
    def has_exited(self) -> bool:
        """True once all ranks have ended."""
        return all(rank.has_exited for rank in self.ranks)

    def is_alive(self, rank: int) -> bool:
        """True while the process of a rank runs."""
        return self._rank(rank).is_alive

    def abandon(self) -> None:
        """Kill all ranks; each exits a little later."""
        self.replies.is_closed = True
        for rank in self.ranks:
            rank.end()

    def kill(self) -> None:
        """Kill all ranks, because the core has died."""
        for rank in self.ranks:
            rank.kill()

    def die(self, rank: int = 0) -> None:
        """Kill a rank, which leaves no message; the core notices a little later."""
        self._rank(rank).end()

    def raise_next(self, rank: int = 0) -> None:
        """Have a rank raise an error in its next step."""
        self._rank(rank).raises_next = True

    def suspend(self, duration: float, rank: int = 0) -> None:
        """Stop a rank for a while."""
        self._rank(rank).stop(duration)

    def stage(self, number: int) -> "list[SimulatedRank]":
        """Return the ranks of a pipeline stage; none if there is no such stage."""
        size = self.config.tensor_parallel_size
        return self.ranks[number * size : (number + 1) * size] if number >= 0 else []

    def meet(self, sequence: int, stage: int) -> None:
        """Let the ranks of a stage compute a step once each of them has begun it."""
        ranks = self.stage(stage)
        if all(rank.current == sequence for rank in ranks):
            duration = self.step_scale * self.rng.choice([0.1, 0.5, 1.0, 3.0])
            for rank in ranks:
                rank.after(duration * self.rng.uniform(1.0, 1.1), rank.finish_step)

    def after(self, process: Process, delay: float, action: Action) -> None:
        """Let a process act after a delay; at once during the first start."""
        if self.is_instant:
            action()
        else:
            process.after(delay, action)

    def _rank(self, rank: int) -> "SimulatedRank":
        return self.ranks[rank % len(self.ranks)]

    def _receive_progress(self, reporter: StartupReporter | None) -> None:
        for rank in self.ranks:
            while rank.progress:
                self._note_progress(rank.number, rank.progress.popleft(), reporter)
            if rank.has_exited:
                raise StartupError(f"worker {rank.number} died", phase=self._phase_of(rank.number))

    def _check_alive(self) -> None:
        for rank in self.ranks:
            if rank.has_exited:
                raise self._reported_failure(0.0) or WorkerFailed(f"worker {rank.number} died")


class SimulatedPublisher:
    """Broadcasts commands, each after its own delay to each rank; replaces `Publisher`."""

    def __init__(self, group: RankedGroup, on_operation: Action) -> None:
        self.next_sequence = 0
        self.num_subscribed = 0
        self._group = group
        self._on_operation = on_operation

    def take_subscriptions(self) -> int:
        """Return how many ranks have subscribed since the last call."""
        taken, self.num_subscribed = self.num_subscribed, 0
        return taken

    def send(self, command: WorkerCommand) -> None:
        """Send a command to all ranks."""
        self._on_operation()
        assert command.sequence == self.next_sequence
        self.next_sequence += 1
        if isinstance(command, StepPlan):
            config = self._group.config
            self._group.num_in_flight += 1
            depth = config.pipeline_parallel_size + config.async_scheduling
            require(self._group.num_in_flight <= depth, f"workers have buffers for {depth} steps, not for more")
        frames = COMMANDS.encode(command)
        for rank in self._group.ranks:
            rank.receive(frames)


class SimulatedReplies:
    """Holds replies in order of arrival; replaces `ResultPull`."""

    def __init__(self, group: RankedGroup) -> None:
        self.is_closed = False
        self._group = group
        self._frames: deque[list[Frame]] = deque()

    @property
    def has_messages(self) -> bool:
        """True when `receive` returns something."""
        return bool(self._frames)

    def put(self, frames: list[Frame]) -> None:
        """Add a reply."""
        self._frames.append(frames)

    def receive(self, timeout_s: float | None = None) -> WorkerReply | None:
        """Return the next reply."""
        if not self._frames:
            return None
        reply = REPLIES.decode(*self._frames.popleft())
        self._group.num_in_flight -= isinstance(reply, StepResult)
        return reply


class SimulatedRank(Process):
    """One rank: it executes commands in order."""

    def __init__(self, group: RankedGroup, number: int, worker: SimulatedWorker) -> None:
        super().__init__(group.world)
        self.number = number
        self.worker = worker
        self.progress: deque[ControlMessage] = deque()
        """What the core can read of its start."""
        self.current = -1
        """The number of the step that it has begun and not ended; -1: none."""
        self.latest_ended = -1
        """The number of the latest step that it has ended."""
        self.stage, _ = group.config.place_of(number)
        self.has_exited = False
        """True once the core can notice its end."""
        self.raises_next = False
        self._group = group
        self._plans: deque[StepPlan | LoadBlocks | StoreBlocks] = deque()
        self._masks: deque[TokenMasks] = deque()
        self._latest = self._latest_reply = 0.0
        """When all commands sent so far have arrived; when all replies have."""

    def start(self, delay: float) -> None:
        """Load for a while, then subscribe to commands."""
        self.progress.append(Progress("worker", "loading weights"))
        self._group.after(self, delay, self._subscribe)

    def end(self) -> None:
        """Die; the core can notice it a little later."""
        self.kill()
        self.world.after(self._group.step_scale * self._group.rng.random(), self._exit)

    def receive(self, frames: list[Frame]) -> None:
        """Receive a command after a delay, in order."""
        self._latest = max(self._latest, self.world.now + self._delay())
        self._group.after(self, self._latest - self.world.now, lambda: self._take(COMMANDS.decode(*frames)))

    def finish_step(self) -> None:
        """End the step that all ranks of the stage have begun. Only one rank of the last stage answers it."""
        group, plan = self._group, self._plans.popleft()
        assert isinstance(plan, StepPlan)
        masks = self._masks.popleft().unpack() if plan.awaits_masks else ()
        self.worker.next_sequence = plan.sequence  # commands arrive in order, and other kinds have numbers, too
        self.current, self.latest_ended = -1, plan.sequence
        result = msgspec.structs.replace(self.worker.execute(plan, masks), elapsed_s=group.step_scale)
        encoded = b"".join(map(bytes, REPLIES.encode(result)))
        require(group.results.setdefault(plan.sequence, encoded) == encoded, f"rank {self.number} computed other bits")
        if self.number == plan.sequence % len(group.ranks) and self._is_poisoned(plan):  # it may be any rank
            group.has_met_poison = True
            self.end()
            return
        if self.raises_next:
            self._fail(plan)
            return
        if self.number == group.config.answering_rank:
            self._reply(result)
        for rank in group.stage(self.stage + 1):
            rank.after(0.0, rank.go_on)
        self.go_on()

    def _take(self, command: WorkerCommand) -> None:
        match command:
            case TokenMasks():
                self._masks.append(command)
            case StepPlan() | LoadBlocks() | StoreBlocks():
                self._plans.append(command)
            case AllocateCache():
                self._reply(CacheReady(command.sequence, self.number))
            case WarmUp():
                self._reply(WarmedUp(command.sequence, self.number, 0.0, 0, 0))
            case _:
                raise AssertionError("a command that no simulated frontend asks for")
        self.go_on()

    def go_on(self) -> None:
        """Begin the next step, unless one is running, its masks have not arrived or an earlier stage computes it."""
        if self.current >= 0 or not self._plans:
            return
        if isinstance(command := self._plans[0], LoadBlocks):
            self._plans.popleft()
            self._load(command)
            self.go_on()
            return
        if isinstance(command, StoreBlocks):
            self._plans.popleft()
            self._group.files.store(self, self.worker, command, self._group.step_scale, self._reply_as_rank)
            self.go_on()
            return
        if command.awaits_masks and not self._masks:
            return
        sequence = command.sequence
        if any(rank.latest_ended < sequence for rank in self._group.stage(self.stage - 1)):
            return
        if self.raises_next and self._group.rng.random() < 0.5:  # before the others have its rows
            self._fail(command)
            return
        self.current = sequence
        self._group.meet(sequence, self.stage)

    def _load(self, command: LoadBlocks) -> None:
        self.worker.begin_load(command)
        delay = self._group.step_scale * self._group.rng.choice([0.0, 0.1, 1.0, 10.0])

        self.after(delay, lambda: self._reply_as_rank(self.worker.finish_load(command.sequence)))

    def _reply_as_rank(self, reply: BlocksLoaded) -> None:
        self._reply(msgspec.structs.replace(reply, rank=self.number))

    def _fail(self, plan: StepPlan) -> None:
        self._reply(CommandFailed(plan.sequence, self.number, "SimulatedError", "it raised", ""))
        self.end()

    def _reply(self, reply: WorkerReply) -> None:
        """Send a reply, which arrives after a delay, even if this process has ended by then."""
        group, frames = self._group, REPLIES.encode(reply)
        self._latest_reply = max(self._latest_reply, self.world.now + self._delay())

        def arrive() -> None:
            group.replies.put(frames)
            group.on_event()

        if group.is_instant:
            group.replies.put(frames)
        else:
            self.world.at(self._latest_reply, arrive)

    def _delay(self) -> float:
        """Mostly nothing; sometimes longer than a step."""
        return self._group.step_scale * self._group.rng.choice([0.0, 0.0, 0.0, 0.01, 2.0])

    def _subscribe(self) -> None:
        self.progress.append(WorkerReady(facts_of(self.number)))
        commands: Any = self._group._publisher
        commands.num_subscribed += 1
        if not self._group.is_instant:
            self._group.on_event()

    def _exit(self) -> None:
        self.has_exited = True
        self._group.on_event()

    def _is_poisoned(self, plan: StepPlan) -> bool:
        rows = self.worker.rows
        return any(part.num_samples and POISON_MARK in rows[part.slot].admitted.request_id for part in plan.scheduled)
