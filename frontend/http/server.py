"""`Server`: uvicorn with our shutdown sequence and acceptor. Independent of the routes."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from octavo.frontend.http.acceptor import Acceptor, connection_limit
from octavo.frontend.http.access_log import route_log
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.garbage import FullCollections
from octavo.frontend.http.http_protocol import HttpProtocol
from octavo.frontend.http.listener import BACKLOG
from octavo.frontend.http.throttle import Throttle
from octavo.frontend.http.tls import CertificateRefresh
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import EngineDeadError, OctavoError

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between updates of the Date header and checks that the engine is alive."""

KEEP_ALIVE_S = 5
"""Seconds that an idle connection stays open after a response."""

FINAL_RESPONSE_S = 2.0
"""Seconds for responses to report an abort or the engine's death before connections are closed."""


class ServedEngine(Protocol):
    """The part of `AsyncClient` that the server uses."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why requests can no longer be served; None while the engine is alive."""

    @property
    def num_live_requests(self) -> int:
        """Number of running and waiting requests."""

    def abort_all(self) -> None:
        """Abort every request. Clients get the output generated so far."""


class Server(uvicorn.Server):
    """An HTTP server: the first signal drains, the second aborts, and the engine's death stops it at once.

    Args:
        app: the application to serve.
        config: the server's configuration.
        engine: the engine whose requests are drained or aborted.
        background: work that no connection waits for; drained and aborted too.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, engine: ServedEngine, background: BackgroundTasks | None = None
    ) -> None:
        route_log(config.disable_access_log_for_endpoints or [])
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                loop="none",
                # The class instead of its name: uvicorn would import a name only after the engine is ready.
                http=HttpProtocol,
                h11_max_incomplete_event_size=config.max_request_head_bytes,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=not config.disable_access_log,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,
                workers=1,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
                ssl_ciphers=config.ssl_ciphers or "DEFAULT",
            )
        )
        self.failure: OctavoError | None = None
        """Why the server had to stop; `None` if a signal stopped it."""
        self._engine = engine
        self._background = background or BackgroundTasks()
        self.server_state.tasks = self._background.tasks  # uvicorn waits for these before it ends
        self._shutdown_timeout_s = config.shutdown_timeout
        self._server_config = config
        self._stop = asyncio.Event()
        self._throttle: Throttle | None = None

    def on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, abort on the second."""
        if self.should_exit:
            self._abort(f"{number.name} again")
            return
        logger.info(
            "%s: draining: no new requests; waiting up to %g s for %d running ones (signal again to abort)",
            number.name,
            self._shutdown_timeout_s,
            self._engine.num_live_requests,
        )
        self.should_exit = True
        self._background.drain()
        self._stop.set()
        asyncio.get_running_loop().call_later(self._shutdown_timeout_s, self._abort, "shutdown timeout")

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal arrives or the engine dies."""
        try:
            await super().serve(sockets)
        finally:
            if self._throttle is not None:
                self._throttle.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        throttle = self._throttle = Throttle()
        limit = connection_limit()
        acceptors: list[Any] = [  # not asyncio servers, but with the methods that uvicorn calls
            Acceptor(
                listening,
                BACKLOG,
                lambda client_socket: HttpProtocol(self.config, self.server_state, client_socket, throttle),
                self.config.ssl,
                throttle,
                lambda: len(self.server_state.connections),
                limit,
            )
            for listening in sockets or []
        ]
        self.servers = acceptors
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the caller passes signals to `on_signal`."""
        yield

    async def main_loop(self) -> None:
        """Wait for a signal or the engine's death, without uvicorn's ten wake-ups per second."""
        refresh = None
        if self.config.ssl and self._server_config.enable_ssl_refresh:
            refresh = CertificateRefresh(self.config.ssl, self._server_config)
        loop = asyncio.get_running_loop()
        collections = FullCollections(lambda: self._engine.num_live_requests, loop.time())
        while not await self.on_tick(counter=0):
            collections.tick(loop.time())
            if refresh:
                refresh.check()
            if self._engine.failure:
                self.fail(self._engine.failure)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)

    def fail(self, cause: OctavoError) -> None:
        """Stop immediately: requests can no longer be served."""
        if self.failure is None:
            self.failure = cause
            self.should_exit = True
            self._stop.set()
            self._background.abort()
            self._engine.abort_all()
            asyncio.get_running_loop().call_later(FINAL_RESPONSE_S, self._close_connections)

    def _abort(self, why: str) -> None:
        """Abort all requests. Clients get the output generated so far, with the finish reason "abort"."""
        if num_requests := self._engine.num_live_requests:
            logger.warning("%s: aborting %d requests", why, num_requests)
        self._background.abort()
        self._engine.abort_all()
        asyncio.get_running_loop().call_later(FINAL_RESPONSE_S, self._close_connections)

    def _close_connections(self) -> None:
        """Close every connection: the last resort against clients that do not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True
