"""One group of workers of the simulation: a virtual process that starts, executes steps, raises, hangs and dies.

It stands where `LocalWorkerGroup` stands in an engine; what it computes is `worker.py`'s.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from octavo.core_proc.workers.group import WorkerFailed
from octavo.protocol.codec import worker_command_codec, worker_reply_codec
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.steps import CommandFailed, SlotMask, StepPlan, StepResult, TokenMasks
from simulation.scenario import POISON_MARK
from simulation.worker import SimulatedWorker
from simulation.world import Action, Process, World

COMMANDS, REPLIES = worker_command_codec(), worker_reply_codec()


class SimulatedGroup:
    """One rank, which is a process of its own.

    Args:
        world: whose time it is.
        rng: of how long steps take.
        config: of the engine.
        num_blocks: of its cache.
        step_scale: seconds that a step takes, about.
        on_news: called when the core must look here.
        on_operation: called before each message to the worker.
        start_s: how long it takes to start; 0.0: it is ready.
    """

    waitables = ()

    def __init__(
        self,
        world: World,
        rng: random.Random,
        config: ResolvedConfig,
        num_blocks: int,
        step_scale: float,
        on_news: Action,
        on_operation: Action,
        start_s: float,
    ) -> None:
        self.process = Process(world)
        self.worker = SimulatedWorker(config, num_blocks)
        self.raises_next = False
        """The next step raises an error in the worker, which then ends."""
        self.is_gone = False
        self.has_met_poison = False
        """Whether a request is what killed it."""
        self._rng = rng
        self._step_scale = step_scale
        self._on_news = on_news
        self._on_operation = on_operation
        self._is_started = start_s == 0.0
        self._num_steps = 0
        self._steps: deque[int] = deque()
        """Steps in flight, as the scheduler counts them."""
        self._plans: deque[StepPlan] = deque()
        self._masks: deque[TokenMasks] = deque()
        self._replies: deque[bytes] = deque()
        self._is_busy = False
        if not self._is_started:
            self.process.after(start_s, self._finish_start)

    @property
    def has_news(self) -> bool:
        """True when `take_result` has something to do."""
        return bool(self._replies)

    def advance(self, plan: CachePlan) -> bool:
        """Tell whether the worker has started.

        Raises:
            WorkerFailed: it has died.
        """
        if not self.process.is_alive:
            raise WorkerFailed("the worker died while it started")
        return self._is_started

    def execute(self, plan: StepPlan) -> None:
        """Send a step."""
        self._on_operation()
        # A group counts its own steps.
        self._steps.append(plan.sequence)
        command = COMMANDS.decode(COMMANDS.encode(msgspec.structs.replace(plan, sequence=self._num_steps)))
        self._num_steps += 1
        assert isinstance(command, StepPlan)
        self._plans.append(command)
        self._go_on()

    def supply(self, masks: Sequence[SlotMask]) -> None:
        """Send the masks of the oldest step that awaits them and has none."""
        self._on_operation()
        command = COMMANDS.decode(COMMANDS.encode(TokenMasks(0, list(masks))))
        assert isinstance(command, TokenMasks)
        self._masks.append(command)
        self._go_on()

    def take_result(self) -> StepResult | None:
        """Return the result of the oldest step that has one.

        Raises:
            WorkerFailed: the worker raised or died.
        """
        if self._replies:
            reply = REPLIES.decode(self._replies.popleft())
            if isinstance(reply, CommandFailed):
                raise WorkerFailed(reply.message, "raised")
            assert isinstance(reply, StepResult)
            return msgspec.structs.replace(reply, sequence=self._steps.popleft())
        if not self.process.is_alive:
            raise WorkerFailed("the worker died")
        return None

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        """Fail the run: no simulated frontend asks for it."""
        raise AssertionError("a profile that nobody has asked for")

    def abandon(self, why: str) -> None:
        """Kill the worker; it is gone a little later."""
        self.process.kill()
        self.process.world.after(self._step_scale * self._rng.random(), self._finish_end)

    def die(self) -> None:
        """End without a word, which the core notices a little later."""
        self.process.kill()
        self.process.world.after(self._step_scale * self._rng.random(), self._on_news)

    def _finish_start(self) -> None:
        self._is_started = True
        self._on_news()

    def _finish_end(self) -> None:
        self.is_gone = True
        self._on_news()

    def _go_on(self) -> None:
        """Compute the next step, unless one is being computed or its masks are not there."""
        if self._is_busy or not self._plans or (self._plans[0].awaits_masks and not self._masks):
            return
        self._is_busy = True
        duration = self._step_scale * self._rng.choice([0.1, 0.5, 1.0, 3.0])
        self.process.after(duration, self._finish_step)

    def _finish_step(self) -> None:
        plan = self._plans.popleft()
        masks = self._masks.popleft().masks if plan.awaits_masks else ()
        result = self.worker.execute(plan, masks)
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
        self._on_news()
        self._go_on()

    def _is_poisoned(self, plan: StepPlan) -> bool:
        rows = self.worker.rows
        return any(part.samples and POISON_MARK in rows[part.slot].admitted.request_id for part in plan.scheduled)
