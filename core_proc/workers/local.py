"""Workers as child processes of this one, on this machine."""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq

from octavo.core_proc.workers.group import WorkerFailed
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.control import PhaseDone, Progress, WorkerReady, WorkerSpec
from octavo.protocol.errors import StartupError
from octavo.protocol.ids import Rank
from octavo.protocol.lifecycle import StartupReporter, StopSignal
from octavo.protocol.steps import (
    AllocateCache,
    CacheReady,
    CommandFailed,
    StopWorker,
    WarmedUp,
    WarmUp,
    WorkerCommand,
    WorkerReply,
)
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""Enough to load weights from the slowest disk. A worker that dies is noticed at once."""
ALLOCATE_TIMEOUT_S = 300.0
WARM_UP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 3.0
FINAL_REPLY_TIMEOUT_S = 0.2
"""How long to wait for the last reply of a worker that has exited by itself: it may still be in the socket."""


class LocalWorkerGroup:
    """One process per rank. Call every method from the thread that made the group: the workers die with that thread.

    Each generation has its own sockets, so a late reply of a dead worker cannot be taken for one of its successor.
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
        """Start the processes without waiting for them.

        Args:
            config: passed to every worker.
            run_dir: private directory for the sockets.
            context: of this process.
            module: what each worker runs, by name.
            log_level: of the workers.
            log_config: of the workers; see `configure_logging`.
            generation: number of this group, from 0.
            facts: what earlier workers have measured, in order of rank; (): the workers measure.

        Raises:
            StartupError: a socket cannot be bound.
            OSError: a process cannot be started.
        """
        self._config, self._run_dir, self._context, self._module = config, run_dir, context, module
        self._log_level, self._log_config = log_level, log_config
        self._generation = generation
        self._known_facts = facts
        self._publisher = Publisher(context, f"ipc://{run_dir}/plans-{generation}")
        self._results = ResultPull(context, f"ipc://{run_dir}/results-{generation}")
        self._num_subscribed = 0
        self._awaited: type[CacheReady] | type[WarmedUp] | None = None
        """The reply that every rank owes us before the first step."""
        self._num_answered = 0
        self._facts: dict[Rank, DeviceFacts] = {}
        self._phases: dict[str, str] = {}
        """The phase that each worker last reported, by name: the error message of one that just exits."""
        self._children: list[Child] = []
        exchange_fd = -1
        try:
            if config.world_size > 1:  # freed with the last process that has it open; a new group starts with zeros
                exchange_fd = os.memfd_create(f"octavo-ranks-{generation}")
            for rank in range(config.world_size):
                self._children.append(self._spawn(rank, exchange_fd))
        except OSError:
            self.kill()
            raise
        finally:
            if exchange_fd >= 0:
                os.close(exchange_fd)

    def _spawn(self, rank: int, exchange_fd: int) -> Child:
        spec = WorkerSpec(
            config=self._config,
            rank=rank,
            world_size=self._config.world_size,
            plan_address=self._publisher.address,
            result_address=self._results.address,
            exchange_fd=exchange_fd,
            rendezvous=f"{self._run_dir}/ranks-{self._generation}",
            facts=self._known_facts[rank] if self._known_facts else None,
            log_level=self._log_level,
            log_config=self._log_config,
        )
        return Child.spawn(self._module, spec, f"worker {rank}", inherited=[exchange_fd] if exchange_fd >= 0 else [])

    @property
    def facts(self) -> list[DeviceFacts]:
        """What each rank measured, in order of rank; complete once the group has started."""
        return [self._facts[rank] for rank in sorted(self._facts)]

    @property
    def waitables(self) -> list[Any]:
        """Sockets and file descriptors that become readable when something has happened. `advance` may change them."""
        children = [child.fileno() for child in self._children]
        if self._results.is_closed:
            return children
        return [self._results.socket, *children, *([] if self._awaited else [self._publisher.socket])]

    @property
    def next_sequence(self) -> int:
        """The number that the next command must have."""
        return self._publisher.next_sequence

    def start(self, reporter: StartupReporter, stop: StopSignal) -> None:
        """Wait for the workers to load, passing their progress on to our own parent.

        Blocks until: all have loaded and subscribed to commands.

        Raises:
            StartupError: one failed (its root cause), or we were told to stop.
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
        """Have every rank do what its steps would otherwise wait for, all of them at once.

        Blocks until: all have done so.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """
        self._send_warm_up()
        self._wait_for_all(WARM_UP_TIMEOUT_S, stop, "warming up")

    def advance(self, plan: CachePlan) -> bool:
        """Do the next part of `start`, `allocate` and `warm_up` without blocking; True once every rank is ready.

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
        if self._awaited is CacheReady and self._have_answered():
            self._send_warm_up()
        return self._awaited is WarmedUp and self._have_answered()

    def broadcast(self, command: WorkerCommand) -> None:
        """Send a command to every rank. Never blocks."""
        self._publisher.send(command)

    def gather(self) -> WorkerReply | None:
        """Return the next reply of any rank, None when there is none. Never blocks.

        Raises:
            WorkerFailed: a worker is gone, or its state cannot be trusted any more.
        """
        reply = self._results.receive(timeout_s=0)
        if reply is None:
            self._check_alive()
        elif isinstance(reply, CommandFailed):
            raise _failed(reply)
        return reply

    def restart(self) -> "LocalWorkerGroup":
        """Return the next group, whose processes start and need not measure. Never blocks.

        Raises:
            StartupError: a socket cannot be bound.
            OSError: a process cannot be started.
        """
        return LocalWorkerGroup(
            self._config,
            self._run_dir,
            self._context,
            module=self._module,
            log_level=self._log_level,
            log_config=self._log_config,
            generation=self._generation + 1,
            facts=self._known_facts or self.facts,
        )

    def stop(self) -> None:
        """Have all workers exit after the commands that were sent before.

        Blocks until: they have ended, or `STOP_TIMEOUT_S` has passed.
        """
        self._publisher.send(StopWorker(self._publisher.next_sequence))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            if child.wait(max(0.0, deadline - time.monotonic())) is None:
                logger.warning("%s did not stop within %.0f s; killing it", child.name, STOP_TIMEOUT_S)

    def abandon(self) -> None:
        """Kill all workers and close the connections to them. Never blocks; `has_exited` tells when they have ended."""
        for child in self._children:
            child.kill()
        self._publisher.close()
        self._results.close()

    @property
    def has_exited(self) -> bool:
        """True once all workers have ended and their memory is free."""
        for child in [child for child in self._children if not child.is_alive]:
            child.close()
            self._children.remove(child)
        return not self._children

    def kill(self) -> None:
        """Kill all workers.

        Blocks until: they have ended.
        """
        self.abandon()
        for child in self._children:
            child.wait()
            child.close()

    def _wait_for_start(self, deadline: float, stop: StopSignal, phase: str) -> None:
        """Wait until something has happened.

        Raises:
            StartupError: nothing has until the deadline, or we were told to stop.
        """
        poller = zmq.Poller()
        for waitable in [*self.waitables, stop.fileno()]:
            poller.register(waitable, zmq.POLLIN)
        events = poller.poll(max(0, int(1000 * (deadline - time.monotonic()))))
        if stop.count:
            raise StartupError("told to stop while starting", phase=phase)
        if not events:
            raise StartupError("the workers did not become ready in time", phase=phase)

    def _has_joined(self, reporter: StartupReporter | None) -> bool:
        """Read the workers' progress; True when all have loaded and subscribed to commands.

        Raises:
            StartupError: one failed (its root cause).
        """
        for child in self._children:
            self._receive_progress(child, reporter)
        self._num_subscribed += self._publisher.take_subscriptions()
        return len(self._facts) == len(self._children) <= self._num_subscribed

    def _send_allocation(self, plan: CachePlan) -> None:
        self.broadcast(AllocateCache(self.next_sequence, plan.blocks_per_group, plan.max_model_len))
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
            while not self._have_answered():
                self._wait_for_start(deadline, stop, phase)
        except WorkerFailed as failure:
            raise StartupError(str(failure), phase=phase) from failure

    def _have_answered(self) -> bool:
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
        return self._num_answered == len(self._children)

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

    def _receive_progress(self, child: Child, reporter: StartupReporter | None) -> None:
        """Read the progress of a loading worker, and pass it on while we start ourselves."""
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
                    pass  # progress means nothing after the start
            except ChildExited as exited:
                raise self._root_cause(exited) from exited

    def _root_cause(self, exited: ChildExited) -> WorkerFailed:
        """Return why a worker ended: the error that it reported, or else its exit code."""
        # A worker that was killed by a signal has reported nothing.
        timeout_s = FINAL_REPLY_TIMEOUT_S if exited.code > 0 else 0.0
        while (reply := self._results.receive(timeout_s)) is not None:
            if isinstance(reply, CommandFailed):
                return _failed(reply)
        return WorkerFailed(str(exited))


def _failed(reply: CommandFailed) -> WorkerFailed:
    logger.error("worker %d failed:\n%s", reply.rank, reply.traceback.rstrip())
    return WorkerFailed(f"worker {reply.rank}: {reply.error_type}: {reply.message}", "raised")
