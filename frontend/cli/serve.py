"""`octavo serve MODEL`: from words to configurations, then to the server."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from octavo.frontend.cli.flags import FlagParser, config_parser, configurations, joining_server
from octavo.frontend.cli.start_log import start_log
from octavo.frontend.http.listener import Listener, listen
from octavo.frontend.spawn import SpawnedEngine, Timeline, read_config, spawn_engine
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError

EXIT_SIGNAL = 128


def run(words: list[str]) -> int:
    """Serve until a signal comes; return the exit code.

    Raises:
        StartupError: the root cause.
        EngineDeadError: the engine died while serving.
    """
    try:
        with _terminable():
            return _run(words)
    except _Terminated:
        print("octavo: SIGTERM while starting", file=sys.stderr)  # noqa: T201
        return EXIT_SIGNAL + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM came before the server heeds it; like `KeyboardInterrupt`, no handler of errors may take it for one."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end what is being done, with its last words, where the event loop does not heed it.

    Raises:
        _Terminated: it came.
    """

    def on_signal(number: int, frame: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(words: list[str]) -> int:
    settings = read_settings(words)
    # Before the settings are looked at: some have something to say in the log.
    start_log(str(settings.get("log_level") or Env.read().log_level), settings.get("log_config_file"))
    if settings.get("join"):
        return _join(joining_server(settings))
    engine, server = configurations(settings)
    if server.headless:
        return _host(engine, server, lambda: engine_now(words))
    # First of all, so that a taken port is known before anything is loaded.
    listener = listen(server)
    try:
        return _serve(engine, server, listener, lambda: engine_now(words))
    finally:
        listener.close()


def engine_now(words: list[str]) -> EngineConfig:
    """Return the engine's configuration as it is said now.

    Raises:
        ConfigError: the file that `--config` names is wrong by now.
    """
    try:
        return configurations(read_settings(words))[0]
    except SystemExit:  # the words were good when the server started: the file no longer names a model
        raise ConfigError(
            "no model is named any more", phase="configuration", hint="see the file of --config"
        ) from None


def _serve(config: EngineConfig, server: ServerConfig, listener: Listener, reread: Callable[[], EngineConfig]) -> int:
    timeline = Timeline()
    with _spawned(config, server, timeline) as engine:
        start = time.monotonic()
        # Only now: these imports take a while, and the engine is on its way meanwhile.
        from octavo.frontend.http import run

        timeline.add("Frontend", "importing the server", time.monotonic() - start)
        return _until_interrupted(lambda: run.run(engine, server, listener, reread))


def _host(config: EngineConfig, server: ServerConfig, reread: Callable[[], EngineConfig]) -> int:
    """Run an engine without a server."""
    if server.api_server_count > 1:
        raise ConfigError(
            "an engine without HTTP has no HTTP processes",
            phase="configuration",
            hint="leave out --headless or --api-server-count",
        )
    with _spawned(config, server, Timeline()) as engine:
        from octavo.frontend.headless import run_headless

        return _until_interrupted(lambda: run_headless(engine, server, reread))


def _join(server: ServerConfig) -> int:
    """Serve HTTP before an engine that runs already."""
    listener = listen(server)
    try:
        from octavo.frontend.http import run

        return _until_interrupted(lambda: run.run_joined(server, listener))
    finally:
        listener.close()


@contextlib.contextmanager
def _spawned(config: EngineConfig, server: ServerConfig, timeline: Timeline) -> Iterator[SpawnedEngine]:
    """Have an engine on its way, and none afterwards."""
    engine = spawn_engine(read_config(config, timeline), timeline, server.engine_address)
    try:
        yield engine
    finally:
        engine.end()


def _until_interrupted(run: Callable[[], None]) -> int:
    """Run what waits for signals; return the exit code."""
    from octavo.frontend.hosting import Interrupted

    try:
        run()
    except Interrupted as interrupted:
        print(f"octavo: {interrupted}", file=sys.stderr)  # noqa: T201
        return EXIT_SIGNAL + interrupted.number
    return 0


def parser() -> FlagParser:
    """Return the flags of `octavo serve`."""
    return config_parser("octavo serve", "Start an OpenAI-compatible server for a model.")


def read_settings(words: list[str]) -> dict[str, Any]:
    """Return all settings: the command line's over the file's.

    Raises:
        ConfigError: the file is wrong.
    """
    return parser().parse_settings(words, may_join=True)
