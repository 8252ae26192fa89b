"""One group of workers of the simulation: a virtual process that starts, executes steps, raises, hangs and dies.

It implements `WorkerGroup` except the first start; `worker.py` computes. A group of several ranks is in `ranks.py`.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from octavo.core_proc.workers.group import Turn, WorkerFailed
from octavo.protocol.codec import Frame, worker_command_codec, worker_reply_codec
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.steps import StepPlan, TokenMasks
from octavo.protocol.worker_commands import (
    BlocksLoaded,
    CommandFailed,
    LoadBlocks,
    StoreBlocks,
    WorkerCommand,
    WorkerReply,
)
from simulation.files import SimulatedFiles
from simulation.scenario import POISON_MARK
from simulation.worker import SimulatedWorker, facts_of
from simulation.world import Action, Process, World

COMMANDS, REPLIES = worker_command_codec(), worker_reply_codec()


class SimulatedGroup:
    """One rank, in a virtual process.

    Args:
        world: the clock.
        rng: draws the durations of steps.
        config: configuration of the engine.
        plan: plan of its cache.
        step_scale: typical duration of a step, in seconds.
        on_event: called when `gather` or `advance` has something for the core.
        on_operation: called before each message to the worker.
        start_s: duration of the start; 0.0: it is ready.
        make_next: starts the next group.
        files: files of KV blocks.
    """

    waitables = ()
    facts: Sequence[DeviceFacts] = (facts_of(0),)

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
        make_next: "Callable[[], SimulatedGroup]",
        files: SimulatedFiles,
    ) -> None:
        self.process = Process(world)
        sizes = plan.num_blocks, plan.cache_groups, plan.num_host_blocks
        self.worker = SimulatedWorker(config, *sizes, files=files.ranks[0])
        self._files = files
        self.raises_next = False
        """The next step raises an error in the worker, which then ends."""
        self.has_exited = False
        self.has_met_poison = False
        """True if a request killed it."""
        self._rng = rng
        self._step_scale = step_scale
        self._on_event = on_event
        self._on_operation = on_operation
        self._is_started = start_s == 0.0
        self.restart = make_next
        self.next_sequence = 0
        self.waits_for = ""
        self.num_joined = 0
        self._plans: deque[StepPlan | LoadBlocks | StoreBlocks] = deque()
        self._masks: deque[TokenMasks] = deque()
        self._replies: deque[list[Frame]] = deque()
        self._is_busy = False
        self._began_s = self._elapsed_s = 0.0
        """When the present plan began, and how long it takes."""
        self._is_interruptible = config.interrupts_plans and all(group.kind != "state" for group in plan.cache_groups)
        if not self._is_started:
            self.process.after(start_s, self._finish_start)

    def join_steps(self) -> None:
        """No other engine needs these workers."""

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        """No other engine's requests are in our steps."""
        return Turn.OWN

    @property
    def has_events(self) -> bool:
        """True when `gather` has something to return."""
        return bool(self._replies)

    def advance(self, plan: CachePlan) -> bool:
        """Tell whether the worker has started.

        Raises:
            WorkerFailed: it has died.
        """
        if not self.process.is_alive:
            raise WorkerFailed("the worker died while it started")
        return self._is_started

    def broadcast(self, command: WorkerCommand) -> None:
        """Send a step, or the masks of one."""
        self._on_operation()
        assert command.sequence == self.next_sequence
        self.next_sequence += 1
        received = COMMANDS.decode(*COMMANDS.encode(command))
        if isinstance(received, TokenMasks):
            self._masks.append(received)
        else:
            assert isinstance(received, StepPlan | LoadBlocks | StoreBlocks), (
                "a command that no simulated frontend asks for"
            )
            self._plans.append(received)
        if self._is_busy and self.process.is_alive:
            self._interrupt()
        self._go_on()

    def gather(self) -> WorkerReply | None:
        """Return the next reply.

        Raises:
            WorkerFailed: the worker raised or died.
        """
        if self._replies:
            reply = REPLIES.decode(*self._replies.popleft())
            if isinstance(reply, CommandFailed):
                raise WorkerFailed(reply.message, "raised")
            return reply
        if not self.process.is_alive:
            raise WorkerFailed("the worker died")
        return None

    def start_at_once(self, plan: CachePlan) -> None:
        """Do nothing: a group without a duration of its start is ready."""

    def is_alive(self, rank: int) -> bool:
        """True while the process runs."""
        return self.process.is_alive

    def kill(self) -> None:
        """Kill the worker, because the core has died."""
        self.process.kill()

    def raise_next(self, rank: int = 0) -> None:
        """Have the next step raise an error."""
        self.raises_next = True

    def suspend(self, duration: float, rank: int = 0) -> None:
        """Stop the worker for a while."""
        self.process.stop(duration)

    def abandon(self) -> None:
        """Kill the worker; it exits a little later."""
        self.process.kill()
        self.process.world.after(self._step_scale * self._rng.random(), self._finish_end)

    def die(self, rank: int = 0) -> None:
        """Die without a message; the core notices a little later."""
        self.process.kill()
        self.process.world.after(self._step_scale * self._rng.random(), self._on_event)

    def _finish_start(self) -> None:
        self._is_started = True
        self._on_event()

    def _finish_end(self) -> None:
        self.has_exited = True
        self._on_event()

    def _go_on(self) -> None:
        """Compute the next step, unless one is running or its masks have not arrived."""
        if self._is_busy or not self._plans:
            return
        if isinstance(command := self._plans[0], LoadBlocks):
            self._plans.popleft()
            self.worker.begin_load(command)
            delay = self._step_scale * self._rng.choice([0.0, 0.1, 1.0, 10.0])
            self.process.after(delay, lambda: self._finish_load(command.sequence))
            self._go_on()
            return
        if isinstance(command, StoreBlocks):
            self._plans.popleft()
            self._files.store(self.process, self.worker, command, self._step_scale, self._reply)
            self._go_on()
            return
        if command.awaits_masks and not self._masks:
            return
        self._is_busy, self._began_s = True, self.process.world.now
        self.worker.max_steps = command.num_steps
        self._finish_after(command, self._step_scale * self._rng.choice([0.1, 0.5, 1.0, 3.0]))
        if len(self._plans) > 1:
            self._interrupt()

    def _interrupt(self) -> None:
        """Let the present plan end with its present step, because another command has arrived."""
        plan = self._plans[0]
        assert isinstance(plan, StepPlan)
        num_left = self.worker.max_steps
        if num_left == 1 or not self._is_interruptible:
            return
        step_s = self._elapsed_s / num_left
        num_made = int((self.process.world.now - self._began_s) / step_s)
        if num_made + 1 < num_left:
            self.worker.max_steps = num_made + 1
            self._finish_after(plan, self.worker.max_steps * step_s)

    def _finish_after(self, plan: StepPlan, elapsed_s: float) -> None:
        """End the present plan this long after it has begun, unless it has ended by then."""
        self._elapsed_s = elapsed_s
        delay = self._began_s + elapsed_s - self.process.world.now
        self.process.after(delay, lambda: self._finish_step() if self._plans and self._plans[0] is plan else None)

    def _finish_load(self, sequence: int) -> None:
        self._reply(self.worker.finish_load(sequence))

    def _reply(self, reply: BlocksLoaded) -> None:
        self._replies.append(REPLIES.encode(reply))
        self._on_event()

    def _finish_step(self) -> None:
        plan = self._plans.popleft()
        assert isinstance(plan, StepPlan)
        masks = self._masks.popleft().unpack() if plan.awaits_masks else ()
        self.worker.next_sequence = plan.sequence  # commands arrive in order, and other kinds have numbers, too
        result = msgspec.structs.replace(self.worker.execute(plan, masks), elapsed_s=self._elapsed_s)
        if self._is_poisoned(plan):
            self.has_met_poison = True
            self.die()
            return
        if self.raises_next:
            self._replies.append(REPLIES.encode(CommandFailed(plan.sequence, 0, "SimulatedError", "it raised", "")))
            self.process.kill()
        else:
            self._replies.append(REPLIES.encode(result))
        self._is_busy = False
        self._on_event()
        self._go_on()

    def _is_poisoned(self, plan: StepPlan) -> bool:
        rows = self.worker.rows
        return any(part.num_samples and POISON_MARK in rows[part.slot].admitted.request_id for part in plan.scheduled)
