"""The common part of all worker groups, wherever their processes run: commands, replies and the phases of the start."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from octavo.core_proc.workers.group import Turn, WorkerFailed
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.control import ControlMessage, PhaseDone, Progress, WorkerReady
from octavo.protocol.errors import StartupError
from octavo.protocol.ids import Rank
from octavo.protocol.lifecycle import StartupReporter, StopSignal
from octavo.protocol.worker_commands import (
    AllocateCache,
    CacheReady,
    CommandFailed,
    WarmedUp,
    WarmUp,
    WorkerCommand,
    WorkerReply,
)

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""Seconds; enough to load weights from the slowest disk. The death of a worker is detected at once."""
ALLOCATE_TIMEOUT_S = 300.0
WARM_UP_TIMEOUT_S = 600.0


class StartingGroup(ABC):
    """The start, commands and replies of a `WorkerGroup`. Subclasses own the processes.

    Args:
        config: configuration of every worker.
        publisher: sends commands.
        results: receives replies.
    """

    def __init__(self, config: ResolvedConfig, publisher: Publisher, results: ResultPull) -> None:
        self._config = config
        self._publisher = publisher
        self._results = results
        self._num_subscribed = 0
        self._awaited: type[CacheReady] | type[WarmedUp] | None = None
        """The reply that every rank must send before the first step. None if none is awaited."""
        self._num_answered = 0
        self._facts: dict[Rank, DeviceFacts] = {}
        self._phases: dict[Rank, str] = {}
        """The phase that each worker last reported, for the error message if it exits without one."""

    @property
    @abstractmethod
    def waitables(self) -> Sequence[Any]:
        """Sockets and file descriptors that become readable on events. `advance` may change them."""

    @property
    def waits_for(self) -> str:
        """What the start is waiting for, such as machines, for messages. Empty if for nothing."""
        return ""

    @abstractmethod
    def _receive_progress(self, reporter: StartupReporter | None) -> None:
        """Pass the reports of loading workers to `_note_progress`. Never blocks.

        Raises:
            StartupError: a worker failed (its root cause).
        """

    @abstractmethod
    def _check_alive(self) -> None:
        """Raise an error if a worker has died. Never blocks.

        Raises:
            WorkerFailed: a worker has died (its root cause).
        """

    @property
    def facts(self) -> list[DeviceFacts]:
        """What each rank measured, ordered by rank. Complete once the group has started."""
        return [self._facts[rank] for rank in sorted(self._facts)]

    @property
    def next_sequence(self) -> int:
        """The sequence number that the next command must have."""
        return self._publisher.next_sequence

    def start(self, reporter: StartupReporter, stop: StopSignal) -> None:
        """Wait until the workers have loaded, and forward their progress to our parent process.

        Blocks until: all have loaded and subscribed to commands.

        Raises:
            StartupError: a worker failed (its root cause), or we were told to stop.
        """
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not self._has_joined(reporter):
            self._wait_for_start(deadline, stop, "starting workers")

    def allocate(self, plan: CachePlan, stop: StopSignal) -> None:
        """Have every rank allocate its part of the cache.

        Blocks until: all have done so.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """
        self._send_allocation(plan)
        self._wait_for_all(ALLOCATE_TIMEOUT_S, stop, "allocating the KV cache")

    def warm_up(self, stop: StopSignal) -> None:
        """Have all ranks warm up at once, so that steps need not wait for it later.

        Blocks until: all have done so.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """
        self._send_warm_up()
        self._wait_for_all(WARM_UP_TIMEOUT_S, stop, "warming up")

    def advance(self, plan: CachePlan) -> bool:
        """Do the next part of `start`, `allocate` and `warm_up` without blocking. Return True once every rank is ready.

        Raises:
            WorkerFailed: a rank did not start.
        """
        if self._awaited is None:
            try:
                has_joined = self._has_joined(None)
            except StartupError as error:
                raise WorkerFailed(str(error), "not_started") from error
            if not has_joined:
                return False
            self._send_allocation(plan)
        if self._awaited is CacheReady and self._have_all_replied():
            self._send_warm_up()
        return self._awaited is WarmedUp and self._have_all_replied()

    def broadcast(self, command: WorkerCommand) -> None:
        """Send a command to every rank. Never blocks."""
        self._publisher.send(command)

    def join_steps(self) -> None:
        """See `WorkerGroup`. Does nothing: no other engine needs these workers."""
        return

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        """See `WorkerGroup`. No other engine's requests are in our steps."""
        return Turn.OWN

    @property
    def num_joined(self) -> int:
        """See `WorkerGroup`."""
        return 0

    def gather(self) -> WorkerReply | None:
        """Return the next reply of any rank. Return None if there is none. Never blocks.

        Raises:
            WorkerFailed: a worker has died, or its state is unreliable.
        """
        reply = self._results.receive(timeout_s=0)
        if reply is None:
            self._check_alive()
        elif isinstance(reply, CommandFailed):
            raise _failed(reply)
        return reply

    def _note_progress(self, rank: Rank, message: ControlMessage, reporter: StartupReporter | None) -> None:
        """Record a loading worker's report, and forward it while this process is starting."""
        match message:
            case Progress():
                self._phases[rank] = message.phase
            case WorkerReady():
                self._facts[message.facts.rank] = message.facts
        # All ranks read about the same amount, so one rank's progress is enough for a display.
        is_repeated = isinstance(message, Progress) and message.fraction is not None and rank != 0
        if reporter and isinstance(message, Progress | PhaseDone) and not is_repeated:
            reporter.send(message)

    def _phase_of(self, rank: Rank) -> str:
        return self._phases.get(rank, "starting workers")

    def _has_joined(self, reporter: StartupReporter | None) -> bool:
        """Read the workers' progress. Return True once all have loaded and subscribed to commands.

        Raises:
            StartupError: a worker failed (its root cause).
        """
        self._receive_progress(reporter)
        self._num_subscribed += self._publisher.take_subscriptions()
        return len(self._facts) == self._config.world_size <= self._num_subscribed

    def _reported_failure(self, timeout_s: float) -> WorkerFailed | None:
        """Return the error that a worker has reported before its exit. Return None if there is none.

        Blocks until: there is one, or `timeout_s` has passed.
        """
        while (reply := self._results.receive(timeout_s)) is not None:
            if isinstance(reply, CommandFailed):
                return _failed(reply)
        return None

    def _wait_for_start(self, deadline: float, stop: StopSignal, phase: str) -> None:
        """Wait for the next event.

        Raises:
            StartupError: the deadline has passed, or we were told to stop.
        """
        poller = zmq.Poller()
        for waitable in [*self.waitables, stop.fileno()]:
            poller.register(waitable, zmq.POLLIN)
        events = poller.poll(max(0, int(1000 * (deadline - time.monotonic()))))
        if stop.count:
            raise StartupError("told to stop while starting", phase=phase)
        if not events:
            reason = f": {self.waits_for}" if self.waits_for else ""
            raise StartupError(f"the workers did not become ready in time{reason}", phase=phase)

    def _send_allocation(self, plan: CachePlan) -> None:
        sizes = plan.blocks_per_group, plan.max_model_len, plan.num_host_blocks, plan.num_host_states
        self.broadcast(AllocateCache(self.next_sequence, *sizes))
        self._awaited, self._num_answered = CacheReady, 0

    def _send_warm_up(self) -> None:
        self.broadcast(WarmUp(self.next_sequence))
        self._awaited, self._num_answered = WarmedUp, 0

    def _wait_for_all(self, timeout_s: float, stop: StopSignal, phase: str) -> None:
        """Wait until every rank has sent the awaited reply.

        Raises:
            StartupError: a rank failed (its root cause), or we were told to stop.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self._have_all_replied():
                self._wait_for_start(deadline, stop, phase)
        except WorkerFailed as failure:
            raise StartupError(str(failure), phase=phase) from failure

    def _have_all_replied(self) -> bool:
        """Return whether every rank has sent the awaited reply.

        Raises:
            WorkerFailed: a rank reported an error, or has ended.
        """
        self._check_alive()
        while (reply := self._results.receive(timeout_s=0)) is not None:
            if isinstance(reply, CommandFailed):
                raise _failed(reply)
            if isinstance(reply, WarmedUp) and reply.num_graphs:
                self._log_graphs(reply)
            self._num_answered += self._awaited is not None and isinstance(reply, self._awaited)
        return self._num_answered == self._config.world_size

    def _log_graphs(self, reply: WarmedUp) -> None:
        planned_bytes = self._facts[reply.rank].graph_bytes
        logger.info(
            "worker %d captured %d CUDA graphs in %.1f s: they take %.0f MiB, and %.0f MiB were planned for them",
            reply.rank,
            reply.num_graphs,
            reply.elapsed_s,
            reply.graph_bytes / 2**20,
            planned_bytes / 2**20,
        )


def _failed(reply: CommandFailed) -> WorkerFailed:
    logger.error("worker %d failed:\n%s", reply.rank, reply.traceback.rstrip())
    return WorkerFailed(f"worker {reply.rank}: {reply.error_type}: {reply.message}", "raised")
