"""Workers of an engine that shares the experts of a model with other engines: a step of one is a step of all.

The n-th steps of all engines are computed together, whichever engine begins first. An engine counts the steps that it
begins, and tells the others when it is ahead. An engine that is behind plans a step of its own; if it has nothing to
plan, it sends its workers a step without rows. So steps need no coordinator, engines without requests sleep, and no
step waits for an engine that does not know of it. Worker groups begin and end together: see `engine_links.py`.
"""

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from octavo.core_proc.workers.engine_links import EngineLinks, FirstEngineLinks, LaterEngineLinks
from octavo.core_proc.workers.group import Turn, WorkerFailed
from octavo.core_proc.workers.local import LocalWorkerGroup
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import StartupError
from octavo.protocol.lifecycle import StartupReporter, StopSignal
from octavo.protocol.steps import StepPlan, StepResult
from octavo.protocol.worker_commands import WorkerCommand, WorkerReply

ABORT_SIGNALS = 2
"""Number of SIGTERMs after which an engine does not wait for the requests of others."""

ROOT_CAUSE_S = 2.0
"""Seconds that a starting engine with a missing peer waits for its parent to stop it. The parent reports the root
cause."""


@dataclass(frozen=True, slots=True)
class LockStepPlace:
    """How an engine reaches the other engines."""

    path: str
    """Path of the socket on which the first engine listens."""
    listener_fd: int = -1
    """The listening socket, if this is the first engine; otherwise -1."""

    def connect(self, config: ResolvedConfig) -> EngineLinks:
        """Return connections for a new group.

        Raises:
            OSError: the other engines cannot be reached.
        """
        num_engines = config.data_parallel_size
        if config.engine_index:
            return LaterEngineLinks(config.engine_index, num_engines, self.path)
        # The descriptor stays open, because later groups listen on it too.
        listener = socket.socket(fileno=socket.dup(self.listener_fd))
        listener.setblocking(False)
        return FirstEngineLinks(num_engines, listener)


class LockStepWorkerGroup(LocalWorkerGroup):
    """Starts its processes when all engines are connected.

    Args:
        place: how this engine reaches the others.
        settings: see `LocalWorkerGroup`.

    Raises:
        OSError: the other engines cannot be reached.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        run_dir: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        place: LockStepPlace,
        stop: StopSignal | None = None,
        **settings: Any,
    ) -> None:
        self._place = place
        self._stop = stop
        self._links = place.connect(config)
        self._empty: deque[int] = deque()
        """Command numbers of steps without rows in flight. Their results are ignored."""
        self._num_joined = 0
        super().__init__(config, run_dir, context, **settings)

    def start(self, reporter: StartupReporter, stop: StopSignal) -> None:
        """See `WorkerGroup`."""
        self._stop = stop
        try:
            super().start(reporter, stop)
        except WorkerFailed as failure:
            _wait([stop.fileno()], ROOT_CAUSE_S)
            raise StartupError(str(failure), phase="starting workers") from failure

    @property
    def waitables(self) -> list[Any]:
        """See `WorkerGroup`."""
        return [*super().waitables, *(connection.fileno() for connection in self._links.waitables)]

    @property
    def waits_for(self) -> str:
        """See `WorkerGroup`."""
        return f"{self._links.missing} is not there" if self._links.missing else ""

    def restart(self) -> "LockStepWorkerGroup":
        """See `WorkerGroup`."""
        settings = self._settings_of_next
        return LockStepWorkerGroup(
            self._config, self._run_dir, self._context, place=self._place, stop=self._stop, **settings
        )

    def broadcast(self, command: WorkerCommand) -> None:
        """See `WorkerGroup`."""
        super().broadcast(command)
        if isinstance(command, StepPlan):
            self._links.begin_step()

    def join_steps(self) -> None:
        """See `WorkerGroup`."""
        while self._links.num_begun < self._links.most_begun:
            self._empty.append(self.next_sequence)
            self.broadcast(StepPlan(self.next_sequence, [], [], [], []))

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        """See `WorkerGroup`."""
        return self._links.take_turn(wants_turn, is_idle)

    @property
    def num_joined(self) -> int:
        """See `WorkerGroup`."""
        return self._num_joined

    def gather(self) -> WorkerReply | None:
        """See `WorkerGroup`."""
        while (reply := super().gather()) is not None:
            if not (isinstance(reply, StepResult) and self._empty and reply.sequence == self._empty[0]):
                return reply
            self._empty.popleft()
            self._num_joined += 1
        return None

    def stop(self) -> None:
        """See `WorkerGroup`. First joins the steps of the other engines until these have no requests either.

        Blocks until: the workers have ended, or the second SIGTERM has arrived.
        """
        self._links.leave()
        with contextlib.suppress(WorkerFailed):
            while not self._links.do_all_leave and (self._stop is None or self._stop.count < ABORT_SIGNALS):
                _wait([*self.waitables, *([self._stop.fileno()] if self._stop else [])], None)
                if self._stop:
                    self._stop.acknowledge()
                self.gather()
                self.join_steps()
        super().stop()

    def abandon(self) -> None:
        """See `WorkerGroup`."""
        self._links.close()
        super().abandon()

    def _launch(self, engines_fd: int = -1) -> None:
        """Start the processes if the group is complete."""
        if engines_fd >= 0:
            super()._launch(engines_fd)

    def _receive_progress(self, reporter: StartupReporter | None) -> None:
        super()._receive_progress(reporter)
        self._check_engines()
        if (memory_fd := self._links.take_memory()) >= 0:
            try:
                self._launch(memory_fd)
            except OSError as error:
                raise StartupError(f"cannot start the workers: {error}", phase="starting workers") from error
            finally:
                os.close(memory_fd)

    def _check_alive(self) -> None:
        super()._check_alive()
        self._check_engines()

    def _check_engines(self) -> None:
        """Handle messages of the other engines.

        Raises:
            WorkerFailed: the group has ended.
        """
        self._links.receive()
        if self._links.lost and not self._links.do_all_leave:
            raise WorkerFailed(self._links.lost, "other_engine", computed_ours=self._links.has_lost_workers)


def _wait(waitables: Sequence[Any], timeout_s: float | None) -> None:
    """Wait until any of these is readable, or `timeout_s` seconds have passed (None: no limit)."""
    poller = zmq.Poller()
    for waitable in waitables:
        poller.register(waitable, zmq.POLLIN)
    poller.poll(None if timeout_s is None else int(1000 * timeout_s))
