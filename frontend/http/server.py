"""`Server`: uvicorn with our way to end. What is said over its connections is the application's business."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn

from octavo.frontend.http.acceptor import Acceptor, max_callers
from octavo.frontend.http.access_log import route_log
from octavo.frontend.http.asgi import Application, AsgiApp
from octavo.frontend.http.connection import Connection
from octavo.frontend.http.listener import BACKLOG
from octavo.frontend.http.pace import Pace
from octavo.frontend.http.tls import CertificateRefresh
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import EngineDeadError, OctavoError

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often the server renews its Date header and looks whether the engine still lives."""

KEEP_ALIVE_S = 5
"""What an idle connection is kept open for after a response."""

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


class Server(uvicorn.Server):
    """One signal drains, a second aborts, a dead engine ends it at once.

    Args:
        app: what to serve.
        config: of the HTTP side.
        engine: whose requests are drained or aborted.
    """

    def __init__(self, app: Application, config: ServerConfig, engine: Engine) -> None:
        route_log(config.disable_access_log_for_endpoints or [])
        super().__init__(
            uvicorn.Config(
                AsgiApp(
                    app,
                    max_body_bytes=config.max_request_body_bytes,
                    keep_alive_s=config.sse_keep_alive_interval,
                ),
                interface="asgi3",
                loop="none",
                # The class, not its name: that would be imported only when the engine is ready.
                http=Connection,
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
        """Why the server had to end, if it was not told to."""
        self._engine = engine
        self._shutdown_timeout_s = config.shutdown_timeout
        self._server_config = config
        self._stop = asyncio.Event()

    def on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, abort on the second."""
        if self.should_exit:
            self._abort(f"{number.name} again")
            return
        logger.info(
            "%s: no new requests; waiting up to %g s for %d running ones (once more to abort them)",
            number.name,
            self._shutdown_timeout_s,
            self._engine.num_live_requests,
        )
        self.should_exit = True
        self._stop.set()
        asyncio.get_running_loop().call_later(self._shutdown_timeout_s, self._abort, "time is up")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to let callers in."""
        pace = Pace()
        limit = max_callers()
        acceptors: list[Any] = [  # no asyncio.Server, but all that uvicorn asks of one
            Acceptor(
                one,
                BACKLOG,
                lambda: Connection(self.config, self.server_state, pace),
                self.config.ssl,
                pace,
                lambda: len(self.server_state.connections),
                limit,
            )
            for one in sockets or []
        ]
        self.servers = acceptors
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `on_signal`."""
        yield

    async def main_loop(self) -> None:
        """Wait for a signal or the engine's death, without uvicorn's ten wake-ups per second."""
        refresh = None
        if self.config.ssl and self._server_config.enable_ssl_refresh:
            refresh = CertificateRefresh(self.config.ssl, self._server_config)
        while not await self.on_tick(counter=0):
            if refresh:
                refresh.look()
            if self._engine.failure:
                self.fail(self._engine.failure)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)

    def fail(self, cause: OctavoError) -> None:
        """End at once: nothing can be served any more."""
        if self.failure is None:
            self.failure = cause
            self.should_exit = True
            self._stop.set()
            self._engine.abort_all()
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut)

    def _abort(self, why: str) -> None:
        """End all requests; their callers get what there is, with finish reason "abort"."""
        if num_requests := self._engine.num_live_requests:
            logger.warning("%s: aborting %d requests", why, num_requests)
        self._engine.abort_all()
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut)

    def _cut(self) -> None:
        """Close every connection, the last resort for callers who do not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True
