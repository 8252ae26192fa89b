"""`EngineDirectory`: tells all HTTP processes which engines there are, and knows what they have made of it."""

import asyncio
import contextlib
import logging
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


class EngineDirectory:
    """The first HTTP process's side of the socket. The others connect to it as soon as they start.

    A process that ends is forgotten: the core aborts its requests, and its successor connects again.

    Args:
        execute: carries out the commands of operators that reach another process.
        engines: returns the engines as they are now.
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

    @property
    def reports(self) -> list[Report]:
        """The latest report of each process."""
        return list(self._followers.values())

    async def listen(self, path: Path) -> None:
        """Accept connections of the other processes."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        """Disconnect all processes; they keep the engines that they have."""
        if self._server:
            self._server.close()
        for writer in list(self._followers):
            writer.close()
        for task in list(self._tasks):
            task.cancel()

    def publish(self) -> int:
        """Send the engines to all processes; return the number of this version."""
        self._version += 1
        for writer in self._followers:
            send(writer, Membership(self._version, list(self._engines())))
        return self._version

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
        result = await self._execute(command)
        send(writer, msgspec.structs.replace(result, call_id=command.call_id))
