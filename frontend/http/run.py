"""`run`: one HTTP server from start to end, with an engine of its own or before one that runs already.

What the routes do is in `routes/`, how its connections end in `server.py`.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from octavo.frontend.client import AsyncClient
from octavo.frontend.hosting import interruptible, joining, prepare_process, restarts, starting, stop_signals, watching
from octavo.frontend.http.app import App
from octavo.frontend.http.conversation import ChatSettings
from octavo.frontend.http.cors import Cors
from octavo.frontend.http.errors import logger as error_log
from octavo.frontend.http.listener import Listener
from octavo.frontend.http.render.answer import AnswerSettings
from octavo.frontend.http.request_log import RequestLog
from octavo.frontend.http.routes.engine import usable_directory
from octavo.frontend.http.server import Server
from octavo.frontend.http.serving import Serving
from octavo.frontend.http.siblings import Siblings
from octavo.frontend.metrics.board import Board
from octavo.frontend.metrics.exporter import Metrics
from octavo.frontend.run_dir import RunDir
from octavo.frontend.spawn import SpawnedEngine
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, InvalidRequestError

logger = logging.getLogger(__name__)

GC_THRESHOLD = 10_000
"""New objects between two rounds of the collector; a request makes hundreds, and hardly ever a cycle."""


def run(engine: SpawnedEngine, server: ServerConfig, listener: Listener, reread: Callable[[], EngineConfig]) -> None:
    """Serve until a signal or the engine's death.

    Blocks until: the server has ended in good order.

    Args:
        engine: on its way already; ended here.
        server: the HTTP side.
        listener: where callers may be waiting.
        reread: returns the engine's configuration as it is said now, for `RESTART_SIGNAL`.

    Raises:
        StartupError: the engine cannot start; holds the root cause.
        EngineDeadError: the engine died while serving; holds the root cause.
        Interrupted: a signal came before the server was ready.
    """
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(engine, server, listener, reread))


def run_joined(config: ServerConfig, listener: Listener) -> None:
    """Serve an engine that runs already, until a signal or its end.

    Blocks until: the server has ended in good order.

    Args:
        config: of the server; names the engine.
        listener: where callers may be waiting.

    Raises:
        StartupError: no engine answers.
        EngineDeadError: it is gone for good; holds the root cause.
        Interrupted: a signal came before the server was ready.
    """
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_joined(config, listener))


async def _serve(
    engine: SpawnedEngine, config: ServerConfig, listener: Listener, reread: Callable[[], EngineConfig]
) -> None:
    ChatSettings.of(config)  # what is wrong with its flags is told now, not when the engine is there
    async with starting(engine) as client:
        await _serve_before(client, engine.run_dir, config, listener, lambda: restarts(client, reread))


async def _serve_joined(config: ServerConfig, listener: Listener) -> None:
    ChatSettings.of(config)
    async with joining(config) as client:
        run_dir = RunDir(Env.read().runtime_dir)
        try:
            await _serve_before(client, run_dir.path, config, listener, contextlib.nullcontext)
        finally:
            run_dir.remove()


async def _serve_before(
    client: AsyncClient,
    directory: Path,
    config: ServerConfig,
    listener: Listener,
    meanwhile: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Serve an engine with all HTTP processes.

    Args:
        client: of the engine.
        directory: a private one.
        config: of the server.
        listener: where callers may be waiting.
        meanwhile: makes what is held while callers are served.

    Raises:
        OctavoError: why the server had to end.
    """
    keys = api_keys(config)
    board_path = directory / "metrics"
    board = Board.create(board_path, config.api_server_count) if config.api_server_count > 1 else None
    server = make_server(client, config, keys, board)
    siblings = Siblings(
        config, keys, client.address, board_path, listener, lambda: client.failure is not None, server.fail
    )
    try:
        with interruptible():
            await siblings.start()
        with meanwhile():
            await _serve_with(siblings, server, client, config, listener)
    finally:
        await siblings.kill()
    if server.failure:
        raise server.failure


async def _serve_with(
    siblings: Siblings, server: Server, client: AsyncClient, config: ServerConfig, listener: Listener
) -> None:
    """Serve until told to stop, and wait for the other processes to end as well."""

    def on_signal(number: signal.Signals) -> None:
        server.on_signal(number)
        siblings.terminate()
        # Closed here, for as long as one process has a socket open callers can connect to it.
        listener.close()

    with stop_signals(on_signal):
        names = ", ".join(client.facts.served_model_names)
        logger.info("engine address for further applications: %s", config.engine_address or client.address)
        logger.info("listening on %s, serving %s", listener.url, names)
        with watching(client, config.watchdog_timeout):
            await server.serve(sockets=[listener.socket])
        if client.failure and client.num_lost_requests:
            server.fail(client.failure)  # a drain that lost its requests is no orderly end
        if server.failure:
            siblings.terminate()
            siblings.terminate()
        await siblings.wait(0 if server.failure else config.shutdown_timeout)


def make_server(client: AsyncClient, config: ServerConfig, keys: Sequence[str], board: Board | None = None) -> Server:
    """Return a server for an engine, with everything that outlives its requests.

    Raises:
        ConfigError: the chat template that the user chose cannot be read, the profiler's directory not be used, or a
            parser not be found.
    """
    if config.log_error_stack:
        error_log.setLevel(logging.DEBUG)
    server = Server(make_app(make_serving(client, config, board), config, keys), config, client)
    # What lives from here on lives for good: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    return server


def make_serving(client: AsyncClient, config: ServerConfig, board: Board | None = None) -> Serving:
    """Return what the routes answer from; the client's observer is its metrics.

    Args:
        client: of the engine.
        config: of the server.
        board: where the metrics are counted; None: where no other process sees them.

    Raises:
        ConfigError: the chat template that the user chose cannot be read, the profiler's directory not be used, or a
            parser not be found.
    """
    metrics = Metrics(
        client.config,
        num_blocks=client.facts.num_blocks,
        max_model_len=client.facts.max_model_len,
        has_vllm_names=config.enable_vllm_metrics,
        board=board,
    )
    client.observer = metrics
    serving = Serving(
        client,
        metrics,
        trusts_request_templates=config.trust_request_chat_template,
        max_n_sequences=config.max_n_sequences,
        max_stop_strings=config.max_stop_strings,
        chat=ChatSettings.of(config),
        profiler_dir=_profiler_dir(config),
        forces_usage=config.enable_force_include_usage,
        request_log=RequestLog.of(config),
        answers=AnswerSettings.of(config),
        stall_deadline_s=config.watchdog_timeout,
    )
    _check_chat_template(serving)
    return serving


def make_app(serving: Serving, config: ServerConfig, api_keys: Sequence[str]) -> App:
    """Return the application that the configuration describes."""
    return App(
        serving,
        api_keys,
        cors=Cors.of(config),
        root_path=config.root_path or "",
        names_requests=config.enable_request_id_headers,
        has_docs=not config.disable_fastapi_docs,
        has_tokenizer_info=config.enable_tokenizer_info_endpoint,
    )


def _profiler_dir(config: ServerConfig) -> Path | None:
    if config.torch_profiler_dir is None:
        return None
    try:
        return usable_directory(Path(config.torch_profiler_dir).resolve())
    except OSError as error:
        message = f"{config.torch_profiler_dir} cannot be written to: {error.strerror}"
        raise ConfigError(message, phase="configuration", hint="choose another --torch-profiler-dir") from None


def _check_chat_template(serving: Serving) -> None:
    """Complain now, not at the first request, of a template that the user chose; a model need not have one."""
    if serving.client.config.chat_template is not None:
        try:
            _ = serving.chat_template
        except InvalidRequestError as error:
            raise ConfigError(error.message, phase="reading the chat template") from None


def api_keys(config: ServerConfig) -> list[str]:
    """Return the accepted keys: the command line's, else the environment's."""
    from_environment = Env.read().api_key
    return config.api_key or ([from_environment] if from_environment else [])
