"""`Follower`: an HTTP process that uses the engines announced by the first process."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable

import msgspec
import zmq

from octavo.frontend.client import AsyncClient
from octavo.frontend.engine_connection import EngineConnection
from octavo.frontend.engine_state import EngineState
from octavo.frontend.membership.messages import (
    AdminCommand,
    AdminResult,
    EngineEntry,
    Membership,
    Report,
    receive,
    send,
)
from octavo.protocol.errors import EngineDeadError, OctavoError, StartupError

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Interval in seconds at which draining engines are checked for live requests."""

JOIN_AGAIN_S = 1.0
"""Seconds before another attempt to join an engine."""


_OWNER_GONE = "the process that owns the engines is gone"


class Follower:
    """Joins, drains and leaves engines as the first process says.

    Args:
        reader: reader of the connection to the first process.
        writer: writer of the same connection.
        join: joins an engine; may take as long as the engine needs to restart.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        join: Callable[[EngineEntry], Awaitable[EngineConnection]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._join = join
        self._client: AsyncClient | None = None
        self._membership = Membership(-1, [])
        self._joining: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, EngineConnection] = {}
        """Engines that were joined before the client existed."""
        self._removing: dict[int, asyncio.Task[None]] = {}
        self._reported = Report()
        self._calls: dict[int, asyncio.Future[AdminResult]] = {}
        self._call_ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._is_closing = False
        self._tasks = [asyncio.create_task(self._receive(), name="engines: receive")]

    @classmethod
    async def connect(cls, path: str, join: Callable[[EngineEntry], Awaitable[EngineConnection]]) -> "Follower":
        """Connect to the first process.

        Raises:
            StartupError: it does not listen there.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise StartupError(f"no HTTP process listens on {path}: {error.strerror}") from None
        return cls(reader, writer, join)

    async def client(self) -> AsyncClient:
        """Return a client of the engines once a serving engine has been joined. The caller must close it."""
        while not (serving := [index for index in self._waiting if self._state(index) is EngineState.SERVING]):
            self._changed.clear()
            await self._changed.wait()
        connections = [self._waiting.pop(index) for index in serving]
        self._client = AsyncClient(*connections, indices=serving)
        for index in list(self._waiting):
            self._client.engine_set.add(index, self._waiting.pop(index))
        for engine in self._client.engines:
            if (entry := self._entry(engine.index)) and entry.is_local:
                engine.pin_engine()
        self._apply()
        self._tasks.append(asyncio.create_task(self._watch(), name="engines: watch"))
        return self._client

    async def execute(self, command: AdminCommand) -> AdminResult:
        """Have the first process carry out a command.

        Raises:
            EngineDeadError: the first process is gone; this process is about to exit, too.
        """
        if self._tasks[0].done():
            raise EngineDeadError(_OWNER_GONE)
        call_id = next(self._call_ids)
        future: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        send(self._writer, msgspec.structs.replace(command, call_id=call_id))
        try:
            return await future
        finally:
            del self._calls[call_id]

    async def __aenter__(self) -> "Follower":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; the client is closed by its owner."""
        self._is_closing = True
        tasks = [*self._tasks, *self._joining.values(), *self._removing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._waiting.values():
            await connection.close()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def _entry(self, index: int) -> EngineEntry | None:
        return next((entry for entry in self._membership.engines if entry.index == index), None)

    def _state(self, index: int) -> EngineState | None:
        entry = self._entry(index)
        return entry.state if entry else None

    async def _receive(self) -> None:
        while (message := await receive(self._reader)) is not None:
            if isinstance(message, Membership):
                self._membership = message
                self._apply()
            elif isinstance(message, AdminResult):
                future = self._calls.get(message.call_id)
                if future and not future.done():  # its caller may have been cancelled a moment ago
                    future.set_result(message)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(_OWNER_GONE))

    def _apply(self) -> None:
        """Apply the latest membership to the engines of the client."""
        wanted = {entry.index: entry for entry in self._membership.engines if _is_wanted(entry)}
        for index, task in self._joining.items():
            if index not in wanted and not task.cancelling():  # the next engine with this index may be another one
                task.cancel()
        for entry in wanted.values():
            is_known = entry.index in self._joining or entry.index in self._waiting
            if not is_known and not (self._client and entry.index in self._client.engine_set):
                task = asyncio.create_task(self._keep_joining(entry.index), name=f"engines: join {entry.index}")
                self._joining[entry.index] = task
        if self._client:
            self._apply_to(self._client)
        self._changed.set()
        self._report()

    def _apply_to(self, client: AsyncClient) -> None:
        engines = client.engine_set
        for entry in self._membership.engines:
            if entry.index in engines:
                engines[entry.index].link.address = entry.address  # address of the next core, if this one dies
        states = {entry.index: entry.state for entry in self._membership.engines if entry.index in engines}
        gone = [engine.index for engine in engines.all if engine.index not in states]
        states |= {index: EngineState.DRAINING for index in gone if engines[index].state is EngineState.SERVING}
        # An engine that was joined late cannot drain, and need not: it has no requests.
        states = {
            index: state
            for index, state in states.items()
            if (engines[index].state, state) != (EngineState.STARTING, EngineState.DRAINING)
        }
        if EngineState.SERVING in states.values():
            engines.set_states(states)
            engines.move_requests(
                [
                    entry.index
                    for entry in self._membership.engines
                    if entry.is_leaving and entry.index in engines and states.get(entry.index) is EngineState.DRAINING
                ]
            )
        for index in gone:
            is_due = engines.is_idle(index) and engines[index].state is not EngineState.SERVING
            if is_due and index not in self._removing:
                self._removing[index] = asyncio.create_task(self._remove(index), name=f"engines: remove {index}")

    async def _remove(self, index: int) -> None:
        assert self._client is not None
        # otherwise it has just taken over the requests of an engine that died
        if self._client.engine_set.is_idle(index):
            await self._client.engine_set.remove(index)

    async def _keep_joining(self, index: int) -> None:
        """Try to join an engine until it is joined or not wanted any more."""
        try:
            while (entry := self._entry(index)) and _is_wanted(entry):
                try:
                    connection = await self._join(entry)
                except (OctavoError, zmq.ZMQError) as error:  # ZMQError: no file descriptors are left
                    logger.warning("cannot join engine %d: %s; trying again", index, error)
                    await asyncio.sleep(JOIN_AGAIN_S)
                    continue
                if self._client:
                    engine = self._client.engine_set.add(index, connection)
                    if entry.is_local:
                        engine.pin_engine()
                else:
                    self._waiting[index] = connection
                return
        finally:
            self._joining.pop(index, None)
            if not self._is_closing:
                self._apply()

    async def _watch(self) -> None:
        """While engines drain, report when they are no longer needed, and leave those that were removed."""
        assert self._client is not None
        while True:
            await self._changed.wait()
            self._changed.clear()
            while any(engine.state is EngineState.DRAINING for engine in self._client.engines) or self._removing:
                await asyncio.sleep(POLL_S)
                self._removing = {index: task for index, task in self._removing.items() if not task.done()}
                if any(self._entry(engine.index) is None for engine in self._client.engines):
                    self._apply_to(self._client)
                self._report()

    def _report(self) -> None:
        if not self._client:
            return
        engines = self._client.engine_set
        joined = [engine.index for engine in engines.all] + list(self._removing)
        busy = [
            engine.index
            for engine in engines.all
            if engine.state is EngineState.DRAINING and not engines.is_idle(engine.index)
        ]
        report = Report(self._membership.version, joined, busy)
        if report != self._reported:
            self._reported = report
            send(self._writer, report)


def _is_wanted(entry: EngineEntry) -> bool:
    return entry.state in (EngineState.STARTING, EngineState.SERVING) and not entry.is_gone
