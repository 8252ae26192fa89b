"""`EngineDirectory`: sends the list of engines to all HTTP processes, and tracks which of them have applied it."""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from octavo.frontend.membership.messages import (
    AdminCommand,
    AdminResult,
    EngineEntry,
    Membership,
    Report,
    receive,
    send,
)

logger = logging.getLogger(__name__)

LATE_S = 5.0
"""Seconds after which a process that has not applied a change is named in the log, repeatedly."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group id of the peer of a Unix socket."""


class EngineDirectory:
    """The first HTTP process's side of the socket. The other processes connect as soon as they start.

    A process that ends is forgotten: the core aborts its requests, and its successor connects again.

    Args:
        execute: carries out the commands of operators that reach another process.
        engines: returns the current engines.
    """

    def __init__(
        self,
        execute: Callable[[AdminCommand], Awaitable[AdminResult]],
        engines: Callable[[], Sequence[EngineEntry]],
    ) -> None:
        self._execute = execute
        self._engines = engines
        self._version = 0
        self._followers: dict[asyncio.StreamWriter, Report] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._late_check: asyncio.TimerHandle | None = None

    @property
    def reports(self) -> list[Report]:
        """Latest report of each process."""
        return list(self._followers.values())

    async def listen(self, path: Path) -> None:
        """Accept connections from the other processes."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        """Disconnect all processes; they keep their engines."""
        if self._server:
            self._server.close()
        if self._late_check:
            self._late_check.cancel()
            self._late_check = None
        for writer in list(self._followers):
            writer.close()
        for task in list(self._tasks):
            task.cancel()

    def publish(self) -> int:
        """Send the engines to all processes; return the version number of this list."""
        self._version += 1
        for writer in self._followers:
            send(writer, Membership(self._version, list(self._engines())))
        if self._late_check is None and self._followers:
            self._check_late_later()
        return self._version

    def _check_late_later(self) -> None:
        self._late_check = asyncio.get_running_loop().call_later(LATE_S, self._check_late, self._version)

    def _check_late(self, version: int) -> None:
        """Log the processes that have not applied a change: an engine that they may need cannot be removed."""
        late = [_process_of(writer) for writer, report in self._followers.items() if report.version < version]
        if late:
            logger.warning(
                "HTTP processes %s have not applied a change of the engines for %g s, and changes wait for them: they "
                "start or are suspended; kill processes that do not recover, and they are replaced",
                *(", ".join(map(str, late)), LATE_S),
            )
        self._late_check = None
        if late or version < self._version:
            self._check_late_later()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._followers[writer] = Report()
        send(writer, Membership(self._version, list(self._engines())))
        try:
            while (message := await receive(reader)) is not None:
                if isinstance(message, Report):
                    self._followers[writer] = message
                elif isinstance(message, AdminCommand):
                    task = asyncio.create_task(self._answer(writer, message), name="engines: command")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            del self._followers[writer]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, writer: asyncio.StreamWriter, command: AdminCommand) -> None:
        try:
            result = await self._execute(command)
        except Exception as error:  # otherwise the operator would wait forever
            logger.exception("octavo admin engines %s failed", command.action)
            result = AdminResult(500, f"{type(error).__name__}: {error}")
        send(writer, msgspec.structs.replace(result, call_id=command.call_id))


def _process_of(writer: asyncio.StreamWriter) -> int:
    """Return the process id of the peer."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])
