"""Connections between the cores of engines that share the experts of a model (expert parallelism).

Every engine connects to the first engine, which forwards messages to the others. A connection lives as long as a group
of workers: an engine that loses its workers closes it, and the kernel closes it if a core dies. The first engine then
closes all other connections. So no engine waits for a dead worker, and all engines start new workers together.
"""

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from octavo.core_proc.workers.group import Turn
from octavo.core_proc.workers.isolation import NOBODY, IsolationTurns
from octavo.protocol.errors import ProtocolError
from octavo.protocol.lock_step import (
    AllLeave,
    GroupFormed,
    IsolationState,
    IsolationTurn,
    JoinGroup,
    LeaveGroup,
    LockStepMessage,
    StepBegun,
    WorkersLost,
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(LockStepMessage)
_MAX_MESSAGE_BYTES = 256


class EngineLinks(ABC):
    """The links of one group of workers to the groups of the other engines.

    Args:
        engine: index of this core's engine.
        num_engines: number of engines in the group.
    """

    def __init__(self, engine: int, num_engines: int) -> None:
        self._engine, self._num_engines = engine, num_engines
        self.num_begun = 0
        """Number of steps that this engine has begun."""
        self.most_begun = 0
        """Number of steps that any engine has begun."""
        self.lost = ""
        """Why the group has ended. Empty if it has not."""
        self.has_lost_workers = False
        """Whether the group has ended because workers have failed."""
        self._lost_engine = engine
        """The engine whose workers have failed."""
        self.do_all_leave = False
        """Whether no engine has requests any more."""
        self._turn = IsolationTurn()
        self._isolation = IsolationState()
        """The isolation state last reported to the first engine."""
        self._memory_fd = -1

    @property
    @abstractmethod
    def waitables(self) -> Sequence[socket.socket]:
        """Sockets that become readable when `receive` has work to do."""

    @property
    @abstractmethod
    def missing(self) -> str:
        """The engines that are missing in the group, for messages."""

    @abstractmethod
    def receive(self) -> None:
        """Handle messages of the other engines. Never blocks."""

    @abstractmethod
    def leave(self) -> None:
        """Tell the other engines that this engine has no requests any more. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Leave and thereby end the group, and tell the others if workers have failed. Idempotent."""

    @abstractmethod
    def _announce(self) -> None:
        """Send `most_begun` to the other engines."""

    @abstractmethod
    def _report(self, state: IsolationState) -> None:
        """Send an isolation state to the first engine."""

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        """Return which requests this engine may run. Never blocks.

        Args:
            wants_turn: whether it has crash suspects, which must not run together with requests of other engines.
            is_idle: whether it has no request in flight.
        """
        is_others = self._turn.engine not in (NOBODY, self._engine)
        state = IsolationState(wants_turn, self._turn.number if is_others and is_idle() else 0)
        if state != self._isolation:
            self._isolation = state
            self._report(state)
        if self._turn.engine == self._engine and self._turn.is_alone:
            return Turn.OWN
        return Turn.NONE if wants_turn or self._turn.engine != NOBODY else Turn.ALL

    def _note_workers_lost(self, engine: int) -> None:
        self.lost = self.lost or f"engine {engine} has lost its workers, which have a part of the experts"
        self.has_lost_workers = True
        self._lost_engine = engine

    def begin_step(self) -> None:
        """Count a step of this engine, and tell the others if no engine has begun it before. Never blocks."""
        self.num_begun += 1
        if self.num_begun > self.most_begun:
            self.most_begun = self.num_begun
            self._announce()

    def take_memory(self) -> int:
        """Return the descriptor of the memory shared by all workers. The caller closes it. Return -1 if the group is
        not complete or the descriptor was taken before."""
        descriptor, self._memory_fd = self._memory_fd, -1
        return descriptor

    def _close_memory(self) -> None:
        if (descriptor := self.take_memory()) >= 0:
            os.close(descriptor)


class FirstEngineLinks(EngineLinks):
    """Links of the first engine, which forms the group and forwards messages.

    Args:
        num_engines: number of engines in the group.
        listener: the socket to which the others connect. Connections queue there until a core accepts them.
    """

    def __init__(self, num_engines: int, listener: socket.socket) -> None:
        super().__init__(0, num_engines)
        self._listener = listener
        self._new: list[socket.socket] = []
        """Connections that have not yet sent the index of their engine."""
        self._members: dict[int, socket.socket] = {}
        self._leaving: set[int] = set()
        self._turns = IsolationTurns(num_engines)
        self._is_formed = False

    @property
    def waitables(self) -> Sequence[socket.socket]:
        """See `EngineLinks`."""
        open_sockets = [*self._new, *self._members.values()]
        return open_sockets if self._is_formed or self._listener.fileno() < 0 else [self._listener, *open_sockets]

    @property
    def missing(self) -> str:
        """See `EngineLinks`."""
        engines = [engine for engine in range(1, self._num_engines) if engine not in self._members]
        return f"engine {', '.join(map(str, engines))}" if engines else ""

    def receive(self) -> None:
        """See `EngineLinks`."""
        if not self._is_formed:
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    self._new.append(connection)
            for connection in self._new[:]:
                self._introduce(connection)
        for engine, connection in list(self._members.items()):
            self._receive_from(engine, connection)
        if not self._is_formed and len(self._members) == self._num_engines - 1:
            self._form()

    def leave(self) -> None:
        """See `EngineLinks`."""
        self._note_leaving(0)

    def close(self) -> None:
        """See `EngineLinks`."""
        if self._is_formed and not self.lost and not self.do_all_leave:
            self._note_workers_lost(self._engine)
        if self.has_lost_workers:
            self._send(WorkersLost(self._lost_engine), without=0)
        for connection in (*self._new, *self._members.values()):
            connection.close()
        self._new, self._members = [], {}
        self._listener.close()
        self.lost = self.lost or "closed"
        self._close_memory()

    def _introduce(self, connection: socket.socket) -> None:
        """Add a new connection, and replace an earlier one of the same engine."""
        try:
            message = _receive(connection)
        except OSError:  # its engine has given up
            message = None
        else:
            if message is None:
                return  # no message yet
        self._new.remove(connection)
        if not isinstance(message, JoinGroup) or not 0 < message.engine < self._num_engines:
            connection.close()
            return
        if message.engine in self._members:
            self._members[message.engine].close()
        self._members[message.engine] = connection

    def _receive_from(self, engine: int, connection: socket.socket) -> None:
        try:
            while (message := _receive(connection)) is not None:
                if isinstance(message, StepBegun) and message.num_steps > self.most_begun:
                    self.most_begun = message.num_steps
                    self._announce(without=engine)
                elif isinstance(message, LeaveGroup):
                    self._note_leaving(engine)
                elif isinstance(message, WorkersLost):
                    self._note_workers_lost(engine)
                elif isinstance(message, IsolationState) and engine not in self._leaving:
                    self._pass_turn(has_changed=self._turns.update(engine, message))
        except OSError:
            self._lose(engine)

    def _lose(self, engine: int) -> None:
        if self._is_formed:
            self.lost = self.lost or f"the core of engine {engine}, which has a part of the experts, has ended"
        else:
            self._members.pop(engine).close()

    def _form(self) -> None:
        """Notify all engines that the group is complete, and send them the memory."""
        self._memory_fd = os.memfd_create("octavo-engines")
        self._is_formed = True
        for engine, connection in self._members.items():
            try:
                socket.send_fds(connection, [_ENCODER.encode(GroupFormed())], [self._memory_fd])
            except OSError:
                self._lose(engine)

    def _announce(self, without: int = 0) -> None:
        self._send(StepBegun(self.most_begun), without)

    def _report(self, state: IsolationState) -> None:
        self._pass_turn(has_changed=self._turns.update(self._engine, state))

    def _pass_turn(self, *, has_changed: bool) -> None:
        if has_changed:
            self._turn = self._turns.turn
            self._send(self._turn, without=0)

    def _note_leaving(self, engine: int) -> None:
        if engine in self._leaving:
            return
        self._leaving.add(engine)
        self._pass_turn(has_changed=self._turns.leave(engine))
        if len(self._leaving) == self._num_engines:
            self.do_all_leave = True
            self._send(AllLeave(), without=0)

    def _send(self, message: LockStepMessage, without: int) -> None:
        packet = _ENCODER.encode(message)
        for engine, connection in list(self._members.items()):
            if engine != without:
                try:
                    connection.send(packet)
                except OSError:  # also if an engine has not read for hundreds of steps
                    if self._is_formed:
                        self._receive_from(engine, connection)  # it may have sent the reason before
                    self._lose(engine)


class LaterEngineLinks(EngineLinks):
    """Links of the engines after the first one.

    Args:
        engine: index of this core's engine.
        num_engines: number of engines in the group.
        path: path of the socket on which the first engine accepts connections, now or later.

    Raises:
        OSError: the process that has started the engines has died, so nobody listens.
    """

    def __init__(self, engine: int, num_engines: int, path: str) -> None:
        super().__init__(engine, num_engines)
        self._path = path
        self._is_formed = False
        self._socket = self._connect()

    @property
    def waitables(self) -> Sequence[socket.socket]:
        """See `EngineLinks`."""
        return [self._socket] if self._socket.fileno() >= 0 else []

    @property
    def missing(self) -> str:
        """See `EngineLinks`."""
        return "" if self._is_formed else "engine 0, or one that it waits for"

    def receive(self) -> None:
        """See `EngineLinks`."""
        try:
            while not self.lost and (message := self._receive()) is not None:
                match message:
                    case StepBegun():
                        self.most_begun = max(self.most_begun, message.num_steps)
                    case AllLeave():
                        self.do_all_leave = True
                    case WorkersLost():
                        self._note_workers_lost(message.engine)
                    case IsolationTurn():
                        self._turn = message
        except OSError:
            self._lose()

    def leave(self) -> None:
        """See `EngineLinks`."""
        self._send(LeaveGroup())

    def close(self) -> None:
        """See `EngineLinks`."""
        if self._is_formed and not self.lost and not self.do_all_leave:
            self._send(WorkersLost(self._engine))
        self._socket.close()
        self.lost = self.lost or "closed"
        self._close_memory()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(self._path)
            connection.send(_ENCODER.encode(JoinGroup(self._engine)))
        except OSError:
            connection.close()
            raise
        return connection

    def _receive(self) -> LockStepMessage | None:
        if self._is_formed:
            return _receive(self._socket)
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, 1)
        except BlockingIOError:
            return None
        if not packet:  # the first engine has restarted before the group was complete
            self._socket.close()
            self._socket = self._connect()
            return None
        self._is_formed = True
        (self._memory_fd,) = descriptors
        return _decode(packet)

    def _lose(self) -> None:
        self.lost = self.lost or "the core of engine 0 or of another one, which has a part of the experts, has ended"

    def _announce(self) -> None:
        self._send(StepBegun(self.most_begun))

    def _report(self, state: IsolationState) -> None:
        self._send(state)

    def _send(self, message: LockStepMessage) -> None:
        try:
            self._socket.send(_ENCODER.encode(message))
        except OSError:
            self.receive()  # the first engine may have sent the reason before
            self._lose()


def _receive(connection: socket.socket) -> LockStepMessage | None:
    """Return the next message. Return None if there is none.

    Raises:
        ConnectionError: the other side has closed the connection.
    """
    try:
        try:
            packet = connection.recv(_MAX_MESSAGE_BYTES)
        except (
            ConnectionResetError
        ):  # it has closed without reading everything; its own messages can still be read after this error
            packet = connection.recv(_MAX_MESSAGE_BYTES)
    except BlockingIOError:
        return None
    if not packet:
        raise ConnectionResetError("the other engine has closed the connection")
    return _decode(packet)


def _decode(packet: bytes) -> LockStepMessage:
    try:
        message: LockStepMessage = _DECODER.decode(packet)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a core has sent an unreadable message: {error}") from error
    return message
