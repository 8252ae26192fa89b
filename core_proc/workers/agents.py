"""`Agents`: the machines (nodes) on which a core can start workers, and the reports of their agents."""

import logging
import socket
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import zmq

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.curve import Authenticator, GroupKeys, check_remote
from octavo.protocol.errors import StartupError
from octavo.protocol.nodes import (
    AgentCommand,
    AgentLost,
    AgentReady,
    AgentsSocket,
    Dismiss,
    RankExited,
    RankReport,
)
from octavo.protocol.version import __version__

logger = logging.getLogger(__name__)

NodeEvent: TypeAlias = RankReport | RankExited | AgentLost


@dataclass
class Node:
    """A machine that runs ranks of a group."""

    name: str
    ranks: range
    agents: dict[str, range]
    """Agents of this machine, with the ranks of each."""
    memory_path: str
    link_address: str


@dataclass
class _Member:
    """A connected agent."""

    ready: AgentReady
    generation: int | None = None
    """The group that uses the agent. None if it is idle."""
    events: deque[NodeEvent] = field(default_factory=deque)


class Agents:
    """All agents of one core, over all generations of its workers.

    Args:
        address: `tcp://HOST:PORT` to listen on; port `*` means any free port.
        keys: keys of the group. None if only this machine can reach the address.
        num_positions: number of positions, each of which needs an agent; 0 if any agents with enough room will do.
        is_uniform: whether all CPUs must have the instruction sets of the first one.

    Raises:
        ConfigError: other machines can reach the address, but there are no keys.
        StartupError: the address cannot be bound.
    """

    def __init__(
        self, address: str, keys: GroupKeys | None, num_positions: int = 0, *, is_uniform: bool = False
    ) -> None:
        address = _with_ip(address)
        check_remote(address, keys is not None)
        self.keys = keys
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        """Context of this core's sockets for workers and agents."""
        if keys:
            Authenticator(self.context, keys.server.clients)
        self._num_positions = num_positions
        self._is_uniform = is_uniform
        self._instruction_sets: list[str] | None = None
        self._socket = AgentsSocket(self.context, address, keys.server if keys else None)
        self.address = self._socket.address
        self._members: dict[str, _Member] = {}
        self._refused: dict[str, str] = {}
        """Reasons why nodes cannot be used, by node name."""
        self._lost: defaultdict[int, list[AgentLost]] = defaultdict(list)
        self._is_dismissed = self._is_closed = False

    @property
    def host(self) -> str:
        """The address of this machine as seen by other machines."""
        return self.address.removeprefix("tcp://").rpartition(":")[0]

    @property
    def waitables(self) -> Sequence[Any]:
        """Sockets and file descriptors that become readable when `poll` has work to do."""
        return [] if self._is_closed else [self._socket.socket]

    def poll(self) -> None:
        """Handle the messages of agents. Never blocks."""
        while not self._is_closed and (message := self._socket.receive()) is not None:
            match message:
                case AgentReady():
                    self._admit(message)
                case AgentLost():
                    self._lose(message)
                case _:
                    if message.agent in self._members:
                        self._members[message.agent].events.append(message)

    def _admit(self, ready: AgentReady) -> None:
        if (ready.version, ready.release) != (PROTOCOL_VERSION, __version__):
            self._refuse(
                ready,
                f"it has octavo {ready.release or 'of an earlier release'} with protocol {ready.version}, node 0 has "
                f"{__version__} with {PROTOCOL_VERSION}: install the same version on both",
            )
            self.send_to(ready.agent, Dismiss())
            return
        if self._is_uniform:
            self._instruction_sets = self._instruction_sets or ready.instruction_sets
            if others := sorted(set(ready.instruction_sets) ^ set(self._instruction_sets)):
                self._refuse(
                    ready,
                    "its CPU would compute different bits than the first node's: only one of them has "
                    + ", ".join(others),
                )
                return
        self._refused.pop(ready.node, None)
        if ready.agent not in self._members:
            logger.info("node %s has joined, with room for %d workers", ready.node, ready.capacity)
        self._members[ready.agent] = _Member(ready)

    def _refuse(self, ready: AgentReady, reason: str) -> None:
        logger.error("node %s cannot be used: %s", ready.node, reason)
        self._refused[ready.node] = f"node {ready.node} cannot be used: {reason}"

    def _lose(self, lost: AgentLost) -> None:
        member = self._members.pop(lost.agent, None)
        if member is None:
            return
        if not self._is_dismissed:
            logger.warning("lost the connection to node %s", member.ready.node)
        if member.generation is not None:
            self._lost[member.generation].append(lost)

    def place(self, generation: int, num_ranks: int) -> list[Node] | None:
        """Reserve agents for all ranks of a group and return their nodes in order. Return None if there is not enough
        room yet."""
        idle = [member for member in self._members.values() if member.generation is None]
        nodes: dict[str, list[_Member]] = defaultdict(list)
        for member in sorted(idle, key=self._order):
            if self._num_positions:  # use the latest agent of each position: earlier ones are lost
                nodes[str(member.ready.position)] = [member]
            else:
                nodes[member.ready.node].append(member)
        if not set(map(str, range(self._num_positions))) <= nodes.keys():
            return None
        placed: list[Node] = []
        rank = 0
        for members in nodes.values():
            first, agents = rank, {}
            for member in members:
                last = min(num_ranks, rank + member.ready.capacity)
                if last > rank:
                    agents[member.ready.agent] = range(rank, last)
                rank = last
            if agents:
                ready = members[0].ready
                placed.append(Node(ready.node, range(first, rank), agents, ready.memory_path, ready.link_address))
        if rank < num_ranks:
            return None
        for node in placed:
            for agent in node.agents:
                self._members[agent].generation = generation
        return placed

    def _order(self, member: _Member) -> tuple[int, bool, str]:
        """Return a sort key. Ranks on one node are consecutive, and rank 0 is on the core's own node if that has an
        agent."""
        ready = member.ready
        if self._num_positions:  # agents of one position keep the order in which they joined
            return ready.position, False, ""
        is_remote = ready.link_address.rpartition(":")[0] != self.host
        return ready.position, is_remote, ready.node

    def missing(self, num_ranks: int) -> str:
        """Return what a group waits for, for messages: nodes that were rejected, with the reason, or that have not
        joined."""
        missing = self._absent(num_ranks)
        return missing and "; ".join([missing, *self._refused.values()])

    def _absent(self, num_ranks: int) -> str:
        idle = [member.ready for member in self._members.values() if member.generation is None]
        if self._num_positions:
            absent = sorted(set(range(self._num_positions)) - {ready.position for ready in idle})
            if absent:
                return f"nodes {', '.join(map(str, absent))} of {self._num_positions} have not joined"
            room = sum({ready.position: ready.capacity for ready in idle}.values())
            remedy = "; give octavo serve the same flags on all nodes"
        else:
            room, remedy = sum(ready.capacity for ready in idle), ""
        return f"there are places for {room} of {num_ranks} workers{remedy}" if room < num_ranks else ""

    def take_events(self, generation: int) -> list[NodeEvent]:
        """Return the reports of a group's agents since the last call. Lost agents come last."""
        self.poll()
        events: list[NodeEvent] = []
        for member in self._members.values():
            if member.generation == generation:
                events += member.events
                member.events.clear()
        return [*events, *self._lost.pop(generation, [])]

    def are_released(self, generation: int) -> bool:
        """Return whether no agent runs ranks of a group any more."""
        return not any(member.generation == generation for member in self._members.values())

    def send(self, generation: int, command: AgentCommand) -> None:
        """Send a command to all agents of a group."""
        for agent, member in self._members.items():
            if member.generation == generation:
                self.send_to(agent, command)

    def send_to(self, agent: str, command: AgentCommand) -> None:
        """Send a command to one agent."""
        if not self._is_closed:
            self._socket.send(agent, command)

    def dismiss(self) -> None:
        """Have all agents exit, because the engine ends. Idempotent."""
        if not self._is_dismissed:
            self._is_dismissed = True
            for agent in self._members:
                self.send_to(agent, Dismiss())

    def close(self) -> None:
        """Dismiss all agents and close the connections to them. The sockets of the groups are closed already.

        Idempotent. Blocks until: the last messages are sent, at most one second.
        """
        if not self._is_closed:
            self.dismiss()
            self._is_closed = True
            self._socket.close()
            self.context.term()


def _with_ip(address: str) -> str:
    """Return the address with its host as an IPv4 address, which zmq needs for binding.

    Raises:
        StartupError: the host name cannot be resolved.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        return f"tcp://{socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]}:{port}"
    except OSError as error:
        raise StartupError(
            f"cannot listen on {address}: {error}", phase="binding sockets", hint="check --master-addr"
        ) from error
