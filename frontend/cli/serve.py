"""`octavo serve MODEL`: parses the command line and runs the server."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from octavo.frontend.cli.flags import FlagParser, config_parser, configurations, joining_server
from octavo.frontend.cli.start_log import start_log
from octavo.frontend.engine_configs import read_config
from octavo.frontend.http.listener import Listener, listen
from octavo.frontend.lora.startup import check_flags
from octavo.frontend.spawn import SpawnedEngine, spawn_engines
from octavo.frontend.timeline import Timeline
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError

EXIT_SIGNAL = 128


def run(argv: list[str]) -> int:
    """Serve until a signal arrives; return the exit code.

    Raises:
        StartupError: the server or an engine cannot start; holds the root cause.
        EngineDeadError: the engine died while serving.
    """
    try:
        with _terminable():
            return _run(argv)
    except _Terminated:
        print("octavo: SIGTERM while starting", file=sys.stderr)
        return EXIT_SIGNAL + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM arrived before the server could handle it. Like `KeyboardInterrupt`, it is not an `Exception`."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Raise an exception on SIGTERM while no event loop handles the signal.

    Raises:
        _Terminated: SIGTERM arrived.
    """

    def on_signal(number: int, frame: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(argv: list[str]) -> int:
    settings = read_settings(argv)
    # Before settings are resolved, because some log warnings.
    env = Env.read()
    start_log(str(settings.get("log_level") or env.log_level), settings.get("log_config_file") or env.log_config_file)
    if settings.get("join"):
        return _join(joining_server(settings))
    engine, server = configurations(settings)
    check_flags(server, has_adapters=engine.lora.enable_lora or engine.model.enable_prompt_embeds)
    if engine.parallel.node_rank:
        return _run_node(engine)
    if server.headless:
        return _host(engine, server, lambda: engine_now(argv))
    if engine.parallel.data_parallel_backend == "ray":
        return _serve_ray(engine, server)
    # First, so that a port in use is reported before anything is loaded.
    listener = listen(server)
    try:
        return _serve(engine, server, listener, lambda: engine_now(argv))
    finally:
        listener.close()


def engine_now(argv: list[str]) -> EngineConfig:
    """Return the engine's configuration, after reading the `--config` file again.

    Raises:
        ConfigError: the file has become invalid.
    """
    try:
        return configurations(read_settings(argv))[0]
    except SystemExit:  # the command line is unchanged, so the file no longer names a model
        raise ConfigError("the configuration no longer names a model", hint="check the --config file") from None


def _serve(config: EngineConfig, server: ServerConfig, listener: Listener, reread: Callable[[], EngineConfig]) -> int:
    timeline = Timeline()
    with _spawned(config, server, timeline) as engine:
        start = time.monotonic()
        # Imported late: these imports are slow, and the engine starts meanwhile.
        from octavo.frontend.http import run

        timeline.add("Frontend", "importing the server", time.monotonic() - start)
        return _until_interrupted(lambda: run.run(engine, server, listener, reread))


def _host(config: EngineConfig, server: ServerConfig, reread: Callable[[], EngineConfig]) -> int:
    """Run an engine without an HTTP server."""
    if server.api_server_count > 1:
        raise ConfigError(
            "an engine without HTTP has no HTTP processes", hint="leave out --headless or --api-server-count"
        )
    with _spawned(config, server, Timeline()) as engine:
        from octavo.frontend.headless import run_headless

        return _until_interrupted(lambda: run_headless(engine, server, reread))


def _serve_ray(config: EngineConfig, server: ServerConfig) -> int:
    """Serve HTTP for engines on the nodes of a Ray cluster."""
    listener = listen(server)
    try:
        from octavo.frontend.http import run

        return _until_interrupted(lambda: run.run_on_ray(config, server, listener))
    finally:
        listener.close()


def _run_node(config: EngineConfig) -> int:
    """Run the workers of an additional machine (`--node-rank`)."""
    resolved = read_config(config)
    from octavo.frontend.node import run_node

    run_node(resolved, config.parallel.node_rank)
    return 0


def _join(server: ServerConfig) -> int:
    """Serve HTTP for a running engine."""
    listener = listen(server)
    try:
        from octavo.frontend.http import run

        return _until_interrupted(lambda: run.run_joined(server, listener))
    finally:
        listener.close()


@contextlib.contextmanager
def _spawned(config: EngineConfig, server: ServerConfig, timeline: Timeline) -> Iterator[list[SpawnedEngine]]:
    """Start the engines in the background, and stop them afterwards."""
    engines = spawn_engines(read_config(config, timeline), timeline, server.engine_address)
    try:
        yield engines
    finally:
        for engine in engines:
            engine.end()


def _until_interrupted(run: Callable[[], None]) -> int:
    """Run a server until a signal arrives; return the exit code."""
    from octavo.frontend.hosting import Interrupted

    try:
        run()
    except Interrupted as interrupted:
        print(f"octavo: {interrupted}", file=sys.stderr)
        return EXIT_SIGNAL + interrupted.number
    return 0


def parser() -> FlagParser:
    """Return the flags of `octavo serve`."""
    return config_parser("octavo serve", "Start an OpenAI-compatible server for a model.")


def read_settings(argv: list[str]) -> dict[str, Any]:
    """Return the settings of the command line, merged over those of the file.

    Raises:
        ConfigError: the file is invalid.
    """
    return parser().parse_settings(argv, may_join=True)
