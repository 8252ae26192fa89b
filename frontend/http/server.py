"""`run`: one engine and one HTTP server from start to end, with its signals and its log.

What the routes do is in `routes/`; this module only brings them up and down.
"""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from octavo.frontend.client import AsyncClient
from octavo.frontend.http.app import build_app
from octavo.frontend.http.listener import Listener
from octavo.frontend.http.serving import Serving
from octavo.frontend.metrics.exporter import Metrics
from octavo.frontend.metrics.log_line import INTERVAL_S, ThroughputLine
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, EngineDeadError, InvalidRequestError

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often the server renews its Date header and looks whether the engine still lives."""

LAST_WORDS_S = 2
"""What responses get to carry out that their requests were aborted, or that the engine has died."""


class Interrupted(Exception):
    """A signal ended the start before the server was ready."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} while starting")
        self.number = number


def run(engine: EngineConfig, server: ServerConfig, listener: Listener) -> None:
    """Serve until a signal or the engine's death.

    Blocks until: the server has ended in good order.

    Raises:
        StartupError: the engine cannot start; holds the root cause.
        EngineDeadError: the engine died while serving; holds the root cause.
        Interrupted: a signal came before the server was ready.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(engine, server, listener))


async def _serve(engine: EngineConfig, config: ServerConfig, listener: Listener) -> None:
    async with _starting(engine, config) as client:
        metrics = Metrics(
            client.config,
            num_blocks=client.facts.num_blocks,
            max_model_len=client.facts.max_model_len,
            has_vllm_names=config.enable_vllm_metrics,
        )
        client.observer = metrics
        serving = Serving(client, metrics, trusts_request_templates=config.trust_request_chat_template)
        _check_chat_template(serving)
        server = Server(build_app(serving, _api_keys(config)), config, client)
        with _stop_signals(server.on_signal):
            names = ", ".join(client.facts.served_model_names)
            logger.info("engine address for further applications: %s", client.address)
            logger.info("listening on %s, serving %s", listener.url, names)
            lines = asyncio.create_task(_log_throughput(client)) if client.config.log_stats else None
            await server.serve(sockets=[listener.socket])
            if lines:
                lines.cancel()
        if server.engine_failure:
            raise server.engine_failure


@contextlib.asynccontextmanager
async def _starting(engine: EngineConfig, config: ServerConfig) -> AsyncIterator[AsyncClient]:
    """Start the engine; a signal meanwhile stops the start."""
    task = asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    start = AsyncClient.launch(config=engine, address=config.engine_address, on_progress=_log_progress)
    try:
        with _stop_signals(on_signal):
            client = await start
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
    try:
        if client.engine:
            logger.info("%s", client.engine.timeline.render())
        yield client
    finally:
        await client.close()


class Server(uvicorn.Server):
    """uvicorn with our way to end: one signal drains, a second aborts, a dead engine ends it at once.

    Args:
        app: what to serve.
        config: of the HTTP side.
        client: whose requests are drained or aborted.
    """

    def __init__(self, app: "FastAPI", config: ServerConfig, client: AsyncClient) -> None:
        _route_uvicorn_log(has_access_log=not config.disable_access_log)
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=not config.disable_access_log,
                server_header=False,
                # The last resort, for callers who do not read; `_abort` comes first.
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + LAST_WORDS_S,
            )
        )
        self.engine_failure: EngineDeadError | None = None
        """Why the engine died, if it did."""
        self._client = client
        self._shutdown_timeout_s = config.shutdown_timeout
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
            self._client.num_live_requests,
        )
        self.should_exit = True
        self._stop.set()
        asyncio.get_running_loop().call_later(self._shutdown_timeout_s, self._abort, "time is up")

    def _abort(self, why: str) -> None:
        """End all requests; their callers get what there is, with finish reason "abort"."""
        if num_requests := self._client.num_live_requests:
            logger.warning("%s: aborting %d requests", why, num_requests)
        self._client.abort_all()
        asyncio.get_running_loop().call_later(LAST_WORDS_S, setattr, self, "force_exit", True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `on_signal`."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end without uvicorn's ten wake-ups per second."""
        while not await self.on_tick(counter=0):
            if self._client.failure:
                self.engine_failure = self._client.failure
                self.config.timeout_graceful_shutdown = LAST_WORDS_S
                self.should_exit = True
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)


def _check_chat_template(serving: Serving) -> None:
    """Complain now, not at the first request, of a template that the user chose; a model need not have one."""
    if serving.client.config.chat_template is not None:
        try:
            _ = serving.chat_template
        except InvalidRequestError as error:
            raise ConfigError(error.message, phase="reading the chat template") from None


@contextlib.contextmanager
def _stop_signals(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _log_throughput(client: AsyncClient) -> None:
    line = ThroughputLine(time.monotonic())
    while True:
        await asyncio.sleep(INTERVAL_S)
        if text := line.next(client.latest_stats, time.monotonic()):
            logger.info("%s", text)


def _log_progress(phase: str, fraction: float | None) -> None:
    if fraction is None:
        logger.info("%s", phase)
    else:
        logger.debug("%s: %.0f %%", phase, 100 * fraction)


def _api_keys(config: ServerConfig) -> list[str]:
    from_environment = Env.read().api_key
    return config.api_key or ([from_environment] if from_environment else [])


def _route_uvicorn_log(*, has_access_log: bool) -> None:
    """Send uvicorn's log where ours goes; of its life we tell ourselves, so only its complaints."""
    ours = logging.getLogger("octavo")
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = ours.handlers
        theirs.propagate = False
        theirs.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = not has_access_log
