"""`Server`: accepts connections, and ends them in good order. What is said on them is the application's business."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from typing import Protocol

from octavo.frontend.http.connection import Application, Connection
from octavo.frontend.http.listener import BACKLOG
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import EngineDeadError

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often the server looks whether the engine still lives, and which connections have been idle for too long."""

KEEP_ALIVE_S = 5.0
"""What an idle connection is kept open for."""

LAST_WORDS_S = 2.0
"""What responses get to carry out that their requests were aborted, or that the engine has died."""


class Engine(Protocol):
    """The part of `AsyncClient` that is needed here."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no request can be served any more; None while the engine lives."""

    @property
    def num_live_requests(self) -> int:
        """Requests that run or wait."""

    def abort_all(self) -> None:
        """End every request with what there is."""


class Server:
    """One signal drains, a second aborts, a dead engine ends it at once.

    Args:
        app: what to serve.
        config: of the HTTP side.
        engine: whose requests are drained or aborted.
    """

    def __init__(self, app: Application, config: ServerConfig, engine: Engine) -> None:
        self.engine_failure: EngineDeadError | None = None
        """Why the engine died, if it did."""
        self._app = app
        self._config = config
        self._engine = engine
        self._connections: set[Connection] = set()
        self._stop = asyncio.Event()
        self._is_listening = False

    @property
    def is_listening(self) -> bool:
        """True while new connections are accepted."""
        return self._is_listening

    async def serve(self, listening: socket.socket) -> None:
        """Serve until a signal or the engine's death, then until the last connection is gone.

        Args:
            listening: closed as soon as no further connection is wanted.
        """
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if listening.family == socket.AF_UNIX else loop.create_server
        acceptor = await create(self._connect, sock=listening, backlog=BACKLOG)
        self._is_listening = True
        await self._until_stopped()
        acceptor.close()
        listening.close()
        self._is_listening = False
        for connection in list(self._connections):
            connection.shut_down()
        await self._until_empty()

    def on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, abort on the second."""
        if self._stop.is_set():
            self._abort(f"{number.name} again")
            return
        logger.info(
            "%s: no new requests; waiting up to %g s for %d running ones (once more to abort them)",
            number.name,
            self._config.shutdown_timeout,
            self._engine.num_live_requests,
        )
        self._stop.set()
        asyncio.get_running_loop().call_later(self._config.shutdown_timeout, self._abort, "time is up")

    def _connect(self) -> Connection:
        return Connection(self._app, self._connections, has_access_log=not self._config.disable_access_log)

    async def _until_stopped(self) -> None:
        while not self._stop.is_set():
            if self._engine.failure:
                self.engine_failure = self._engine.failure
                asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut)
                return
            self._close_idle()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)

    def _close_idle(self) -> None:
        deadline = time.monotonic() - KEEP_ALIVE_S
        for connection in list(self._connections):
            if connection.idle_since is not None and connection.idle_since < deadline:
                connection.shut_down()

    async def _until_empty(self) -> None:
        while self._connections:
            await asyncio.wait([connection.closed for connection in self._connections])

    def _abort(self, why: str) -> None:
        """End all requests; their callers get what there is, with finish reason "abort"."""
        if num_requests := self._engine.num_live_requests:
            logger.warning("%s: aborting %d requests", why, num_requests)
        self._engine.abort_all()
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut)

    def _cut(self) -> None:
        """Close every connection, the last resort for callers who do not read."""
        for connection in list(self._connections):
            connection.abort()
