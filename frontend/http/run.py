"""`run` and `run_joined`: an HTTP server with its own engine, or for an engine that already runs.

The routes are in `routes/`, shutdown is in `server.py`.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from octavo.frontend.client import AsyncClient
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.hosting import (
    interruptible,
    join_entry,
    joining,
    prepare_process,
    restarts,
    starting,
    stop_signals,
    watching,
)
from octavo.frontend.http.api_workers import ApiWorkers
from octavo.frontend.http.app import make_app
from octavo.frontend.http.app_state import Execute
from octavo.frontend.http.configure import api_keys, make_app_state
from octavo.frontend.http.errors import logger as error_log
from octavo.frontend.http.garbage import bound_pauses
from octavo.frontend.http.listener import Listener
from octavo.frontend.http.server import Server
from octavo.frontend.lora.registry import FILE_NAME as ADAPTERS_FILE
from octavo.frontend.lora.startup import load_modules
from octavo.frontend.membership.messages import SOCKET_NAME
from octavo.frontend.membership.operator import EngineOperator
from octavo.frontend.metrics.shared_counters import SharedCounters
from octavo.frontend.run_dir import RunDir
from octavo.frontend.spawn import SpawnedEngine
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import Env

if TYPE_CHECKING:
    from octavo.frontend.ray_engines import RayEngines

logger = logging.getLogger(__name__)


def run(
    engines: Sequence[SpawnedEngine], server: ServerConfig, listener: Listener, reread: Callable[[], EngineConfig]
) -> None:
    """Serve until a signal arrives or the engine dies.

    Blocks until: the server has shut down.

    Args:
        engine: already spawned; stopped here.
        server: the server's configuration.
        listener: bound already; clients may be waiting in its queue.
        reread: reads the engine's configuration again, for `RESTART_SIGNAL`.

    Raises:
        StartupError: the engine could not start; holds the root cause.
        EngineDeadError: the engine died while serving; holds the root cause.
        Interrupted: a signal arrived before the server was ready.
    """
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(engines, server, listener, reread))


def run_joined(config: ServerConfig, listener: Listener) -> None:
    """Serve an engine that already runs, until a signal arrives or the engine ends.

    Blocks until: the server has shut down.

    Args:
        config: the server's configuration; names the engine.
        listener: bound already; clients may be waiting in its queue.

    Raises:
        StartupError: no engine responds.
        EngineDeadError: the engine died and does not return; holds the root cause.
        Interrupted: a signal arrived before the server was ready.
    """
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_joined(config, listener))


def run_on_ray(engine: EngineConfig, config: ServerConfig, listener: Listener) -> None:
    """Start engines on the nodes of a Ray cluster, and serve them until a signal arrives or all are gone.

    Blocks until: the server has shut down.

    Args:
        engine: the configuration of each engine.
        config: the server's configuration.
        listener: bound already; clients may be waiting in its queue.

    Raises:
        ConfigError: Ray is not installed.
        StartupError: there is no cluster, or an engine could not start; holds the root cause.
        EngineDeadError: all engines are gone; holds the root cause.
        Interrupted: a signal arrived before the server was ready.
    """
    # Not at the top: Ray is an extra.
    from octavo.frontend.ray_engines import RayEngines

    prepare_process()
    ChatSettings.of(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_on_ray(RayEngines(engine), config, listener))


async def _serve_on_ray(engines: "RayEngines", config: ServerConfig, listener: Listener) -> None:
    try:
        with interruptible():
            client = await engines.start()
        async with client:
            await _serve_client(client, config, listener, None)
    finally:
        await engines.close()


async def _serve(
    engines: Sequence[SpawnedEngine], config: ServerConfig, listener: Listener, reread: Callable[[], EngineConfig]
) -> None:
    ChatSettings.of(config)  # report invalid flags now, not after the engine has loaded
    async with starting(engines) as client:
        await _serve_client(client, config, listener, reread)


async def _serve_joined(config: ServerConfig, listener: Listener) -> None:
    ChatSettings.of(config)
    async with joining(config) as client:
        await _serve_client(client, config, listener, None)


async def _serve_client(
    client: AsyncClient,
    config: ServerConfig,
    listener: Listener,
    reread: Callable[[], EngineConfig] | None,
) -> None:
    """Serve an engine with all HTTP processes.

    Args:
        client: connected to the engine.
        config: the server's configuration.
        listener: bound already; clients may be waiting in its queue.
        reread: reads the engines' configuration again; None: they belong to another process.

    Raises:
        OctavoError: why the server had to stop.
    """
    run_dir = RunDir(Env.read().runtime_dir)  # not an engine's own, which goes when it is replaced
    try:
        await _serve_with(run_dir.path, client, config, listener, reread)
    finally:
        run_dir.remove()


async def _serve_with(
    directory: Path,
    client: AsyncClient,
    config: ServerConfig,
    listener: Listener,
    reread: Callable[[], EngineConfig] | None,
) -> None:
    """Serve as `_serve_client`; `directory` is for what the HTTP processes share."""
    keys = api_keys(config)
    counters_path = directory / "metrics"
    counters = SharedCounters.create(counters_path, config.api_server_count) if config.api_server_count > 1 else None
    operator = EngineOperator(client, reread, partial(join_entry, config=config))
    server = make_server(client, config, keys, counters, operator.execute)
    socket_path = directory / SOCKET_NAME
    api_workers = ApiWorkers(
        config, keys, str(socket_path), counters_path, listener, lambda: client.failure is not None, server.fail
    )
    try:
        client.adapters.share(directory / ADAPTERS_FILE)
        await load_modules(config, client.adapters)
        if config.api_server_count > 1:
            await operator.directory.listen(socket_path)
        with interruptible():
            await api_workers.start()
        with restarts(operator.restart, reread) if reread else contextlib.nullcontext():
            await _serve_until_stopped(api_workers, server, client, config, listener)
    finally:
        await api_workers.kill()
        await operator.close()
    if server.failure:
        raise server.failure


async def _serve_until_stopped(
    api_workers: ApiWorkers, server: Server, client: AsyncClient, config: ServerConfig, listener: Listener
) -> None:
    """Serve until told to stop, then wait for the other processes to exit."""

    def on_signal(number: signal.Signals) -> None:
        server.on_signal(number)
        api_workers.terminate()
        # This process holds all sockets open; clients could still connect to one that is not closed here.
        listener.close()

    with stop_signals(on_signal):
        names = ", ".join(client.facts.served_model_names)
        address = client.address if len(client.engines) > 1 else config.engine_address or client.address
        logger.info("engine address for further applications: %s", address)
        logger.info("listening on %s, serving %s", listener.url, names)
        with watching(client, config.watchdog_timeout):
            await server.serve(sockets=[listener.socket])
        if client.failure and client.num_lost_requests:
            server.fail(client.failure)  # a drain that lost requests counts as a failure
        if server.failure:
            api_workers.terminate()
            api_workers.terminate()
        await api_workers.wait(0 if server.failure else config.shutdown_timeout)


def make_server(
    client: AsyncClient,
    config: ServerConfig,
    keys: Sequence[str],
    counters: SharedCounters | None = None,
    execute: Execute | None = None,
) -> Server:
    """Return a server for an engine, with its application state.

    Args:
        client: of the engine.
        config: of the server.
        keys: the accepted API keys.
        counters: see `make_app_state`.
        execute: carries out commands of operators.

    Raises:
        ConfigError: the chat template cannot be read, the profiler's directory cannot be used, or a parser does not
            exist.
    """
    if config.log_error_stack:
        error_log.setLevel(logging.DEBUG)
    server = Server(make_app(make_app_state(client, config, counters, execute), config, keys), config, client)
    bound_pauses()
    return server
