"""`run` and `run_joined`: an HTTP server with its own engine, or for engines that already run.

The routes are in `routes/`, shutdown is in `server.py`.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from octavo.frontend.calls.services import USAGE_FILE, CallServices, check_services
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
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.configure import api_keys, batch_service, make_app_state, with_shared_responses
from octavo.frontend.http.errors import logger as error_log
from octavo.frontend.http.garbage import limit_gc_pauses
from octavo.frontend.http.listener import Listener
from octavo.frontend.http.server import Server
from octavo.frontend.http.several_models import ServedEngines, check_join, check_names, config_of_each
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
        engine: an engine that is already spawned; it is stopped here.
        server: the server's configuration.
        listener: already bound; clients may be waiting in its queue.
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
    """Serve engines that already run, until a signal arrives or all of them have ended.

    Blocks until: the server has shut down.

    Args:
        config: the server's configuration, which names the engines.
        listener: already bound; clients may be waiting in its queue.

    Raises:
        StartupError: an engine does not respond.
        ConfigError: the engines' models cannot be served together.
        EngineDeadError: the engines died and do not come back; holds the root cause.
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
        listener: already bound; clients may be waiting in its queue.

    Raises:
        ConfigError: Ray is not installed.
        StartupError: there is no cluster, or an engine could not start; holds the root cause.
        EngineDeadError: all engines are gone; holds the root cause.
        Interrupted: a signal arrived before the server was ready.
    """
    # Imported here because Ray is an optional dependency.
    from octavo.frontend.ray_engines import RayEngines

    prepare_process()
    ChatSettings.of(config)
    check_services(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_on_ray(RayEngines(engine), config, listener))


async def _serve_on_ray(engines: "RayEngines", config: ServerConfig, listener: Listener) -> None:
    try:
        with interruptible():
            client = await engines.start()
        async with client:
            await _serve_clients([client], config, listener, None)
    finally:
        await engines.close()


async def _serve(
    engines: Sequence[SpawnedEngine], config: ServerConfig, listener: Listener, reread: Callable[[], EngineConfig]
) -> None:
    ChatSettings.of(config)  # report invalid flags now, not after the engine has loaded
    check_services(config, engines[0].config)
    async with starting(engines) as client:
        await _serve_clients([client], config, listener, reread)


async def _serve_joined(config: ServerConfig, listener: Listener) -> None:
    ChatSettings.of(config)
    check_services(config)
    check_join(config)
    async with joining(config) as clients:
        check_names(clients, config.join or ())
        await _serve_clients(clients, config, listener, None)


async def _serve_clients(
    clients: Sequence[AsyncClient],
    config: ServerConfig,
    listener: Listener,
    reread: Callable[[], EngineConfig] | None,
) -> None:
    """Serve engines with all HTTP processes.

    Args:
        clients: connected to the engines, one per model.
        config: the server's configuration.
        listener: already bound; clients may be waiting in its queue.
        reread: reads the engines' configuration again; None: the engines belong to another process.

    Raises:
        OctavoError: the reason why the server had to stop.
    """
    # not an engine's run directory, which is removed when the engine is replaced
    run_dir = RunDir(Env.read().runtime_dir)
    try:
        await _serve_with(run_dir.path, clients, config, listener, reread)
    finally:
        run_dir.remove()


async def _serve_with(
    directory: Path,
    clients: Sequence[AsyncClient],
    config: ServerConfig,
    listener: Listener,
    reread: Callable[[], EngineConfig] | None,
) -> None:
    """Serve like `_serve_clients`, with a directory that the HTTP processes share."""
    keys = api_keys(config)
    counters_path = directory / "metrics"
    counters = SharedCounters.create(counters_path, config.api_server_count) if config.api_server_count > 1 else None
    operators = [EngineOperator(client, reread, partial(join_entry, config=config)) for client in clients]
    configs = [with_shared_responses(own, directory) for own in config_of_each(config, clients)]
    background = BackgroundTasks()
    states = [
        make_app_state(client, own, counters, operator.execute, background)
        for client, own, operator in zip(clients, configs, operators, strict=True)
    ]
    usage_path = directory / USAGE_FILE if config.api_server_count > 1 else None
    calls = CallServices.open(config, clients[0].config, usage_path)
    server = make_server(states, config, keys, calls)
    engines = ServedEngines(clients)
    socket_path = directory / SOCKET_NAME
    api_workers = ApiWorkers(
        config, keys, str(socket_path), counters_path, listener, lambda: engines.failure is not None, server.fail
    )
    try:
        for index, (client, own) in enumerate(zip(clients, configs, strict=True)):
            client.adapters.share(directory / (f"{ADAPTERS_FILE}-{index}" if index else ADAPTERS_FILE))
            await load_modules(own, client.adapters)
        if config.api_server_count > 1:
            await operators[0].directory.listen(socket_path)
        with interruptible():
            await api_workers.start()
        with restarts(operators[0].restart, reread) if reread else contextlib.nullcontext():
            await _serve_until_stopped(api_workers, server, clients, config, listener)
    finally:
        await api_workers.kill()
        for state in states:
            state.responses.close()
        calls.close()
        for operator in operators:
            await operator.close()
    if server.failure:
        raise server.failure


async def _serve_until_stopped(
    api_workers: ApiWorkers, server: Server, clients: Sequence[AsyncClient], config: ServerConfig, listener: Listener
) -> None:
    """Serve until asked to stop, then wait for the other processes to exit."""

    def on_signal(number: signal.Signals) -> None:
        server.on_signal(number)
        api_workers.terminate()
        # This process keeps all sockets open. Clients could still connect to a socket that is not closed here.
        listener.close()

    with stop_signals(on_signal):
        names = ", ".join(name for client in clients for name in client.facts.served_model_names)
        with contextlib.ExitStack() as stack:
            for client in clients:
                address = client.address if len(client.engines) > 1 else config.engine_address or client.address
                logger.info("engine address for further applications: %s", address)
                prefix = f"{client.facts.served_model_names[0]}: " if len(clients) > 1 else ""
                stack.enter_context(watching(client, config.watchdog_timeout, prefix))
            logger.info("listening on %s, serving %s", listener.url, names)
            await server.serve(sockets=[listener.socket])
        for client in clients:
            if client.failure and client.num_lost_requests:
                server.fail(client.failure)  # a drain that lost requests counts as a failure
        if server.failure:
            api_workers.terminate()
            api_workers.terminate()
        await api_workers.wait(0 if server.failure else config.shutdown_timeout)


def make_server(states: Sequence[AppState], config: ServerConfig, keys: Sequence[str], calls: CallServices) -> Server:
    """Return a server for some models.

    Args:
        states: the route states, one per model. The first one serves requests that name no model. All states share
        their background tasks.
        config: the server's configuration.
        keys: the accepted API keys.
        calls: the per-request services.

    Raises:
        ConfigError: the batch directory cannot be used.
    """
    if config.log_error_stack:
        error_log.setLevel(logging.DEBUG)
    background = states[0].background
    batches = batch_service(config, background, calls.tenants)
    state = replace(states[0], others=tuple(states[1:]), calls=calls, batches=batches)
    engines = ServedEngines([one.client for one in states])
    server = Server(make_app(state, config, keys), config, engines, background)
    if state.batches is not None:
        app = make_app(replace(state, batches=None), config, keys=None)
        half = max(1, state.client.facts.max_num_seqs // 2)  # the other half is for other clients' requests
        state.batches.start(app, engines, half)
    limit_gc_pauses()
    return server
