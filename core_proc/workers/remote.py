"""Workers on several machines: agents start them, and all sockets are tcp with keys."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import zmq

from octavo.core_proc.workers.agents import Agents, Node
from octavo.core_proc.workers.group import WorkerFailed
from octavo.core_proc.workers.starting import StartingGroup
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.control import NodePlace, Progress, WorkerSpec
from octavo.protocol.errors import StartupError
from octavo.protocol.lifecycle import StartupReporter
from octavo.protocol.nodes import AgentLost, EndRanks, RankExited, RankReport, StartRanks
from octavo.protocol.supervise import ChildExited
from octavo.protocol.worker_commands import StopWorker

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
FINAL_REPLY_TIMEOUT_S = 0.5
"""Seconds to wait for the last reply of a worker that has exited by itself: it may still be on its way."""


class RemoteWorkerGroup(StartingGroup):
    """One process per rank, started by the agents of machines with room."""

    def __init__(
        self,
        agents: Agents,
        config: ResolvedConfig,
        *,
        log_level: str,
        log_config: str = "",
        generation: int = 0,
        facts: Sequence[DeviceFacts] = (),
    ) -> None:
        """Return without waiting: `start` or `advance` place the ranks when there is room.

        Args:
            agents: agents of this core.
            config: passed to every worker.
            log_level: log level of the workers.
            log_config: logging configuration of the workers; see `configure_logging`.
            generation: number of this group, from 0.
            facts: measurements of earlier workers, ordered by rank. Empty if the workers must measure.

        Raises:
            StartupError: a socket cannot be bound.
        """
        keys = agents.keys.server if agents.keys else None
        address = f"tcp://{agents.host}:*"
        super().__init__(config, Publisher(agents.context, address, keys), ResultPull(agents.context, address, keys))
        self._agents = agents
        self._log_level, self._log_config = log_level, log_config
        self._generation = generation
        self._known_facts = facts
        self._nodes: list[Node] | None = None
        """Nodes of the ranks. None if there was no room yet."""
        self._reported_missing = ""
        self._running: set[int] = set()
        """Ranks that were started and have not ended."""

    @property
    def waitables(self) -> list[Any]:
        """Sockets and file descriptors that become readable on events. `advance` may change them."""
        agents = list(self._agents.waitables)
        if self._results.is_closed:
            return agents
        return [self._results.socket, *agents, *([] if self._awaited else [self._publisher.socket])]

    @property
    def waits_for(self) -> str:
        """The machines that have not joined."""
        return "" if self._nodes is not None else self._agents.missing(self._config.world_size)

    def restart(self) -> "RemoteWorkerGroup":
        """Return the next group, which starts when there is room for all ranks. Never blocks.

        Raises:
            StartupError: a socket cannot be bound.
        """
        return RemoteWorkerGroup(
            self._agents,
            self._config,
            log_level=self._log_level,
            log_config=self._log_config,
            generation=self._generation + 1,
            facts=self._known_facts or self.facts,
        )

    def stop(self) -> None:
        """Have all workers exit after the commands sent so far, and dismiss the agents.

        Blocks until: they have ended, or `STOP_TIMEOUT_S` has passed.
        """
        self._publisher.send(StopWorker(self._publisher.next_sequence))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._running and self._wait_for_agents(deadline):
            for event in self._agents.take_events(self._generation):
                if isinstance(event, RankExited):
                    self._running.discard(event.rank)
                elif isinstance(event, AgentLost):
                    self._running.difference_update(self._ranks_of(event))
        if self._running:
            logger.warning("workers %s did not stop within %.0f s", sorted(self._running), STOP_TIMEOUT_S)
        self._agents.dismiss()

    def abandon(self) -> None:
        """Have all workers killed and close the connections to them. Never blocks."""
        self._agents.send(self._generation, EndRanks())
        self._publisher.close()
        self._results.close()

    @property
    def has_exited(self) -> bool:
        """True once all agents have killed their workers or have died. The workers of a dead agent die with it."""
        self._agents.take_events(self._generation)
        return self._agents.are_released(self._generation)

    def kill(self) -> None:
        """Kill all workers, and dismiss the agents.

        Blocks until: they have ended, or `STOP_TIMEOUT_S` has passed.
        """
        self.abandon()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not self.has_exited and self._wait_for_agents(deadline):
            pass
        self._agents.close()

    def _wait_for_agents(self, deadline: float) -> bool:
        """Wait until an agent has sent something. Return False if the deadline passes first."""
        poller = zmq.Poller()
        for waitable in self._agents.waitables:
            poller.register(waitable, zmq.POLLIN)
        return bool(poller.poll(max(0, int(1000 * (deadline - time.monotonic())))))

    def _has_joined(self, reporter: StartupReporter | None) -> bool:
        return self._are_placed(reporter) and super()._has_joined(reporter)

    def _are_placed(self, reporter: StartupReporter | None) -> bool:
        """Start the ranks once there is room. Return whether they were started."""
        if self._nodes is not None:
            return True
        self._agents.poll()
        self._nodes = self._agents.place(self._generation, self._config.world_size)
        if self._nodes is None:
            missing = self.waits_for
            if missing != self._reported_missing:
                self._reported_missing = missing
                logger.info("waiting for nodes: %s", missing)
                if reporter:
                    reporter.send(Progress(f"waiting for nodes: {missing}"))
            return False
        for index, node in enumerate(self._nodes):
            names = f"workers {node.ranks[0]} to {node.ranks[-1]}" if len(node.ranks) > 1 else f"worker {node.ranks[0]}"
            logger.info("starting %s on node %s", names, node.name)
            for agent, ranks in node.agents.items():
                specs = [self._spec(rank, rank - ranks[0], index) for rank in ranks]
                self._agents.send_to(
                    agent, StartRanks(generation=self._generation, memory_path=node.memory_path, specs=specs)
                )
                self._running.update(ranks)
        return True

    def _spec(self, rank: int, device_number: int, node: int) -> WorkerSpec:
        assert self._nodes is not None
        keys = self._agents.keys
        return WorkerSpec(
            config=self._config,
            rank=rank,
            world_size=self._config.world_size,
            plan_address=self._publisher.address,
            result_address=self._results.address,
            facts=self._known_facts[rank] if self._known_facts else None,
            place=NodePlace(
                node=node,
                first_ranks=[*(one.ranks[0] for one in self._nodes), self._config.world_size],
                link_addresses=[one.link_address for one in self._nodes],
                secret=keys.secret.decode() if keys else "",
            ),
            device_number=device_number,
            generation=self._generation,
            log_level=self._log_level,
            log_config=self._log_config,
        )

    def _receive_progress(self, reporter: StartupReporter | None) -> None:
        for event in self._agents.take_events(self._generation):
            if isinstance(event, RankReport):
                self._note_progress(event.rank, event.message, reporter)
            elif isinstance(event, RankExited):
                raise self._end_of(event).as_startup_error(self._phase_of(event.rank))
            else:
                raise StartupError(self._loss_of(event), phase="starting workers", hint="see the log of that node")

    def _check_alive(self) -> None:
        for event in self._agents.take_events(self._generation):
            if isinstance(event, AgentLost):
                raise WorkerFailed(self._loss_of(event))
            if isinstance(event, RankExited):
                exited = self._end_of(event)
                # A worker killed by a signal has reported nothing.
                timeout_s = FINAL_REPLY_TIMEOUT_S if exited.code > 0 else 0.0
                raise self._reported_failure(timeout_s) or WorkerFailed(f"{exited} on node {self._node_of(event)}")

    @staticmethod
    def _end_of(event: RankExited) -> ChildExited:
        return ChildExited(f"worker {event.rank}", event.code, event.failure)

    def _node_of(self, event: RankReport | RankExited | AgentLost) -> str:
        return next((node.name for node in self._nodes or () if event.agent in node.agents), "unknown")

    def _ranks_of(self, event: AgentLost) -> list[int]:
        return [rank for node in self._nodes or () for rank in node.agents.get(event.agent, ())]

    def _loss_of(self, event: AgentLost) -> str:
        ranks = ", ".join(map(str, self._ranks_of(event)))
        node = self._node_of(event)
        return (
            f"lost node {node} with worker {ranks}: its agent or the machine has ended, or the network is interrupted"
        )
