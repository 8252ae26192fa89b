"""Workers as child processes of this one, on this machine."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from octavo.core_proc.workers.group import WorkerFailed
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.control import PhaseDone, Progress, WorkerReady, WorkerSpec
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.ids import Rank
from octavo.protocol.lifecycle import Reporter, StopSignal
from octavo.protocol.steps import (
    Acknowledged,
    AllocateCache,
    CacheReady,
    CommandFailed,
    Profile,
    SlotMask,
    StepPlan,
    StepResult,
    Stop,
    TokenMasks,
)
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""For loading weights from the slowest disk; a worker that dies is noticed at once."""
ALLOCATE_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 3.0
LAST_WORDS_S = 0.2
"""How long the last reply of a worker that ended by itself may still be on its way."""


class LocalWorkerGroup:
    """One process per rank. Call everything from the thread that made it: its end ends the workers.

    Each generation has sockets of its own, so that nothing that a dead worker has sent can be taken for an answer of
    one that lives.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        run_dir: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        module: str,
        log_level: str,
        log_config: str = "",
        generation: int = 0,
        facts: Sequence[DeviceFacts] = (),
    ) -> None:
        """Start the processes; `start` waits for them, `advance` looks after them.

        Args:
            config: handed to every worker.
            run_dir: private directory for the sockets.
            context: of this process.
            module: what each worker runs, by name.
            log_level: of the workers.
            log_config: of the workers; see `configure_logging`.
            generation: counts the groups of one engine.
            facts: what an earlier generation has measured, in order of rank; (): the workers measure.

        Raises:
            StartupError: a socket cannot be bound.
            OSError: a process cannot be started.
        """
        self._publisher = Publisher(context, f"ipc://{run_dir}/plans-{generation}")
        self._results = ResultPull(context, f"ipc://{run_dir}/results-{generation}")
        self._num_subscribed = 0
        self._num_allocated = 0
        self._is_allocating = False
        self._facts: dict[Rank, DeviceFacts] = {}
        self._phases: dict[str, str] = {}
        """What each worker was last doing, by name, for one that ends without a word."""
        self._steps: deque[tuple[int, int]] = deque()
        """Steps in flight: number on the wire, number of the step."""
        self._acknowledgements: deque[tuple[int, str, Callable[[str], None]]] = deque()
        """What to call when as many ranks have acknowledged, oldest command first."""
        self._children: list[Child] = []
        try:
            for rank in range(config.world_size):
                spec = WorkerSpec(
                    config=config,
                    rank=rank,
                    world_size=config.world_size,
                    plan_address=self._publisher.address,
                    result_address=self._results.address,
                    facts=facts[rank] if facts else None,
                    log_level=log_level,
                    log_config=log_config,
                )
                self._children.append(Child.spawn(module, spec, f"worker {rank}"))
        except OSError:
            self.kill()
            raise

    @property
    def facts(self) -> list[DeviceFacts]:
        """What each rank measured, in order of rank."""
        return [self._facts[rank] for rank in sorted(self._facts)]

    @property
    def waitables(self) -> list[Any]:
        """Sockets and file descriptors: one becomes readable when something has happened. They change at `advance`."""
        children = [child.fileno() for child in self._children]
        if self._results.is_closed:
            return children
        return [self._results.socket, *children, *([] if self._is_allocating else [self._publisher.socket])]

    def start(self, reporter: Reporter, stop: StopSignal) -> None:
        """Follow the workers while they load, passing their life signs on to our own parent.

        Blocks until: all are ready and subscribed.

        Raises:
            StartupError: one failed (its root cause), or we were told to stop.
        """
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not self._has_joined(reporter):
            self._wait_for_start(deadline, stop)

    def allocate(self, plan: CachePlan, stop: StopSignal) -> None:
        """Make the KV tensors.

        Blocks until: every rank has them.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """
        self._send_allocation(plan)
        deadline = time.monotonic() + ALLOCATE_TIMEOUT_S
        try:
            while not self._has_allocated():
                self._wait_for_start(deadline, stop)
        except WorkerFailed as failure:
            raise StartupError(str(failure), phase="allocating the KV cache") from failure

    def advance(self, plan: CachePlan) -> bool:
        """Go on with the start as far as possible without waiting; True when every rank has loaded and has its cache.

        Raises:
            WorkerFailed: a rank did not start.
        """
        if not self._is_allocating:
            try:
                has_joined = self._has_joined(None)
            except StartupError as error:
                raise WorkerFailed(str(error), "not_started") from error
            if not has_joined:
                return False
            self._send_allocation(plan)
        return self._has_allocated()

    def execute(self, plan: StepPlan) -> None:
        """Send a step to every rank. Never blocks."""
        sequence = self._publisher.next_sequence
        self._steps.append((sequence, plan.sequence))
        if sequence != plan.sequence:  # other commands have numbers too
            plan = msgspec.structs.replace(plan, sequence=sequence)
        self._publisher.send(plan)

    def supply(self, masks: Sequence[SlotMask]) -> None:
        """Send every rank the masks of the oldest step that awaits them and has none. Never blocks."""
        self._publisher.send(TokenMasks(self._publisher.next_sequence, list(masks)))

    def take_result(self) -> StepResult | None:
        """Return the result of the oldest step that has one, None when none is there. Never blocks.

        Raises:
            WorkerFailed: a worker is gone, or its state cannot be trusted any more.
        """
        try:
            while (reply := self._results.receive(timeout_s=0)) is not None:
                match reply:
                    case StepResult():
                        return self._numbered(reply)
                    case CommandFailed():
                        raise _failed(reply)
                    case Acknowledged():
                        self._acknowledge(reply)
                    case _:
                        raise ProtocolError(f"worker {reply.rank} sent an unexpected {type(reply).__name__}")
        except ProtocolError as error:  # it says what no worker in its right mind says
            raise WorkerFailed(str(error), "raised") from error
        self._check_alive()
        return None

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        """Start (None: stop) the profiler on every rank.

        Args:
            directory: for the profile.
            on_done: called from a later `take_result` or `abandon`, with what went wrong, "" when nothing did.
        """
        self._publisher.send(Profile(self._publisher.next_sequence, directory))
        self._acknowledgements.append((len(self._children), "", on_done))

    def stop(self) -> None:
        """Ask all workers to end when they have done what they were told before.

        Blocks until: they have ended, or `STOP_TIMEOUT_S` has passed.
        """
        self._publisher.send(Stop(self._publisher.next_sequence))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            if child.wait(max(0.0, deadline - time.monotonic())) is None:
                logger.warning("%s did not stop within %.0f s", child.name, STOP_TIMEOUT_S)

    def abandon(self, why: str) -> None:
        """Kill all workers and listen to them no more; `is_gone` tells when they have ended. Never blocks.

        Args:
            why: told to those that wait for an acknowledgement.
        """
        for child in self._children:
            child.kill()
        self._publisher.close()
        self._results.close()
        self._steps.clear()
        while self._acknowledgements:
            *_, on_done = self._acknowledgements.popleft()
            on_done(why)

    @property
    def is_gone(self) -> bool:
        """True when all workers have ended, and given back their memory."""
        for child in [child for child in self._children if not child.is_alive]:
            child.close()
            self._children.remove(child)
        return not self._children

    def kill(self) -> None:
        """End all workers at once, those that have ended already included.

        Blocks until: they have ended.
        """
        self.abandon("the engine ends")
        for child in self._children:
            child.wait()
            child.close()

    def _wait_for_start(self, deadline: float, stop: StopSignal) -> None:
        """Wait until something has happened."""
        poller = zmq.Poller()
        for waitable in [*self.waitables, stop.fileno()]:
            poller.register(waitable, zmq.POLLIN)
        events = poller.poll(max(0, int(1000 * (deadline - time.monotonic()))))
        if stop.count:
            raise StartupError("told to stop while starting", phase="starting workers")
        if not events:
            raise StartupError("the workers did not become ready in time", phase="starting workers")

    def _has_joined(self, reporter: Reporter | None) -> bool:
        """Hear the workers' life signs; True when all have loaded, and have subscribed to what they will be told.

        Raises:
            StartupError: one failed (its root cause).
        """
        for child in self._children:
            self._hear(child, reporter)
        self._num_subscribed += self._publisher.take_subscriptions()
        return len(self._facts) == len(self._children) <= self._num_subscribed

    def _send_allocation(self, plan: CachePlan) -> None:
        self._publisher.send(AllocateCache(self._publisher.next_sequence, plan.num_blocks, plan.max_model_len))
        self._is_allocating = True

    def _has_allocated(self) -> bool:
        """True when every rank has said that it has its cache.

        Raises:
            WorkerFailed: one said, or its silence says, that it failed.
        """
        self._check_alive()
        while (reply := self._results.receive(timeout_s=0)) is not None:
            if isinstance(reply, CommandFailed):
                raise _failed(reply)
            self._num_allocated += isinstance(reply, CacheReady)
        return self._num_allocated == len(self._children)

    def _hear(self, child: Child, reporter: Reporter | None) -> None:
        """Take a loading worker's life signs, and pass them on while we start ourselves."""
        try:
            while (message := child.receive(timeout_s=0)) is not None:
                match message:
                    case Progress():
                        self._phases[child.name] = message.phase
                    case WorkerReady():
                        self._facts[message.facts.rank] = message.facts
                if reporter and isinstance(message, Progress | PhaseDone):
                    reporter.send(message)
        except ChildExited as exited:
            raise exited.as_startup_error(self._phases.get(child.name, "starting workers")) from exited

    def _check_alive(self) -> None:
        for child in self._children:
            try:
                while child.receive(timeout_s=0) is not None:
                    pass  # life signs after the start say nothing new
            except ChildExited as exited:
                raise self._root_cause(exited) from exited

    def _root_cause(self, exited: ChildExited) -> WorkerFailed:
        """Return why a worker ended: what it said last, if it could, else how it ended."""
        # Who is killed says nothing any more.
        timeout_s = LAST_WORDS_S if exited.code > 0 else 0.0
        while (reply := self._results.receive(timeout_s)) is not None:
            if isinstance(reply, CommandFailed):
                return _failed(reply)
        return WorkerFailed(str(exited))

    def _numbered(self, result: StepResult) -> StepResult:
        """Return the result under the number of its step; on the wire it has the number of its command."""
        if not self._steps or self._steps[0][0] != result.sequence:
            raise ProtocolError(f"result of command {result.sequence}, which is not the step that is due")
        sequence, step = self._steps.popleft()
        return result if sequence == step else msgspec.structs.replace(result, sequence=step)

    def _acknowledge(self, reply: Acknowledged) -> None:
        if not self._acknowledgements:
            raise ProtocolError("a worker acknowledged a command that nobody gave")
        num_missing, fault, on_done = self._acknowledgements.popleft()
        fault = fault or (reply.fault and f"worker {reply.rank}: {reply.fault}")
        if num_missing > 1:
            self._acknowledgements.appendleft((num_missing - 1, fault, on_done))
        else:
            on_done(fault)


def _failed(reply: CommandFailed) -> WorkerFailed:
    logger.error("worker %d failed:\n%s", reply.rank, reply.traceback.rstrip())
    return WorkerFailed(f"worker {reply.rank}: {reply.error_type}: {reply.message}", "raised")
