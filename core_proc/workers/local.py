"""Workers as child processes on this machine."""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq

from octavo.core_proc.workers.fork_server import ForkServer
from octavo.core_proc.workers.group import WorkerFailed
from octavo.core_proc.workers.starting import StartingGroup
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.control import WorkerSpec
from octavo.protocol.lifecycle import StartupReporter
from octavo.protocol.supervise import Child, ChildExited
from octavo.protocol.worker_commands import StopWorker

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3.0
FINAL_REPLY_TIMEOUT_S = 0.2
"""Seconds to wait for the last reply of a worker that has exited by itself: it may still be in the socket."""


class LocalWorkerGroup(StartingGroup):
    """One process per rank. Call every method from the thread that created the group: the workers die with that thread.

    Each generation has its own sockets. So a late reply of a dead worker cannot be mistaken for a reply of its
    successor.
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
        fork_server: ForkServer | None = None,
    ) -> None:
        """Start the processes without waiting for them.

        Args:
            config: passed to every worker.
            run_dir: private directory for the sockets.
            context: ZeroMQ context of this process.
            module: name of the module that each worker runs.
            log_level: log level of the workers.
            log_config: logging configuration of the workers; see `configure_logging`.
            generation: number of this group, from 0.
            facts: measurements of earlier workers, ordered by rank. Empty if the workers must measure.
            fork_server: forks the workers. None if they are started directly.

        Raises:
            StartupError: a socket cannot be bound.
            OSError: a process cannot be started.
        """
        super().__init__(
            config,
            Publisher(context, f"ipc://{run_dir}/plans-{generation}"),
            ResultPull(context, f"ipc://{run_dir}/results-{generation}"),
        )
        self._run_dir, self._context, self._module = run_dir, context, module
        self._log_level, self._log_config = log_level, log_config
        self._generation = generation
        self._known_facts = facts
        self._children: dict[int, Child] = {}
        """Worker processes by rank, without those that have exited and were closed."""
        self._fork_server = fork_server
        try:
            if fork_server and not fork_server.is_alive:  # it has ended together with an earlier group
                self._fork_server = ForkServer()
            self._launch()
        except OSError:
            self.kill()
            raise

    def _launch(self, engines_fd: int = -1) -> None:
        """Start the processes.

        Args:
            engines_fd: see `WorkerSpec`.

        Raises:
            OSError: a process cannot be started.
        """
        exchange_fd = -1
        try:
            if self._config.world_size > 1:  # freed when the last process closes it; each group starts with zeros
                exchange_fd = os.memfd_create(f"octavo-ranks-{self._generation}")
            for rank in range(self._config.world_size):
                self._children[rank] = self._spawn(rank, exchange_fd, engines_fd)
        finally:
            if exchange_fd >= 0:
                os.close(exchange_fd)

    def _spawn(self, rank: int, exchange_fd: int, engines_fd: int) -> Child:
        spec = WorkerSpec(
            config=self._config,
            rank=rank,
            world_size=self._config.world_size,
            plan_address=self._publisher.address,
            result_address=self._results.address,
            exchange_fd=exchange_fd,
            engines_fd=engines_fd,
            rendezvous=f"{self._run_dir}/ranks-{self._generation}",
            generation=self._generation,
            facts=self._known_facts[rank] if self._known_facts else None,
            log_level=self._log_level,
            log_config=self._log_config,
        )
        inherited = [descriptor for descriptor in (exchange_fd, engines_fd) if descriptor >= 0]
        if self._fork_server is not None:
            return self._fork_server.spawn(spec, f"worker {rank}", inherited)
        return Child.spawn(self._module, spec, f"worker {rank}", inherited=inherited)

    @property
    def waitables(self) -> list[Any]:
        """Sockets and file descriptors that become readable on events. `advance` may change them."""
        children = [child.fileno() for child in self._children.values()]
        if self._results.is_closed:
            return children
        return [self._results.socket, *children, *([] if self._awaited else [self._publisher.socket])]

    def restart(self) -> "LocalWorkerGroup":
        """Return the next group. Its processes are starting and skip measurements. Never blocks.

        Raises:
            StartupError: a socket cannot be bound.
            OSError: a process cannot be started.
        """
        return LocalWorkerGroup(self._config, self._run_dir, self._context, **self._settings_of_next)

    @property
    def _settings_of_next(self) -> dict[str, Any]:
        """Return the keyword arguments for the next group."""
        return {
            "module": self._module,
            "log_level": self._log_level,
            "log_config": self._log_config,
            "generation": self._generation + 1,
            "facts": self._known_facts or self.facts,
            "fork_server": self._fork_server,
        }

    def stop(self) -> None:
        """Have all workers exit after the commands sent so far.

        Blocks until: they have ended, or `STOP_TIMEOUT_S` has passed.
        """
        self._publisher.send(StopWorker(self._publisher.next_sequence))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children.values():
            if child.wait(max(0.0, deadline - time.monotonic())) is None:
                logger.warning("%s did not stop within %.0f s; killing it", child.name, STOP_TIMEOUT_S)
        self._end_fork_server()

    def abandon(self) -> None:
        """Kill all workers and close the connections to them. Never blocks; `has_exited` tells when they have ended."""
        for child in self._children.values():
            child.kill()
        self._publisher.close()
        self._results.close()

    @property
    def has_exited(self) -> bool:
        """True once all workers have ended and their memory is free."""
        for rank in [rank for rank, child in self._children.items() if not child.is_alive]:
            self._children.pop(rank).close()
        return not self._children

    def kill(self) -> None:
        """Kill all workers.

        Blocks until: they have ended.
        """
        self.abandon()
        for child in self._children.values():
            child.wait()
            child.close()
        self._end_fork_server()

    def _end_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.kill()

    def _receive_progress(self, reporter: StartupReporter | None) -> None:
        failures: dict[int, ChildExited] = {}
        for rank, child in self._children.items():
            try:
                while (message := child.receive(timeout_s=0)) is not None:
                    self._note_progress(rank, message, reporter)
            except ChildExited as exited:
                failures[rank] = exited
        if failures:
            # Ranks that lose their connection to a dead rank fail too, with an error of their own.
            rank = min(failures, key=lambda rank: (failures[rank].is_consequence, rank))
            error = failures[rank].as_startup_error(self._phase_of(rank))
            raise (error if self._config.world_size == 1 else error.of(f"worker {rank}")) from failures[rank]

    def _check_alive(self) -> None:
        for child in self._children.values():
            try:
                while child.receive(timeout_s=0) is not None:
                    pass  # progress reports are ignored after the start
            except ChildExited as exited:
                # A worker killed by a signal has reported nothing.
                timeout_s = FINAL_REPLY_TIMEOUT_S if exited.code > 0 else 0.0
                raise (self._reported_failure(timeout_s) or WorkerFailed(str(exited))) from exited
