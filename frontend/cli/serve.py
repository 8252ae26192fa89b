"""`octavo serve MODEL`: from words to configurations, then to the server."""

import sys
import time
from typing import Any

from octavo.frontend.cli.flags import config_parser, read_config_file
from octavo.frontend.http.listener import Listener, listen
from octavo.frontend.spawn import Timeline, read_config, spawn_engine
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.config.sources import engine_config, server_config, server_fields
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.log import configure_logging

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

EXIT_SIGNAL = 128


def run(words: list[str]) -> int:
    """Serve until a signal comes; return the exit code.

    Raises:
        StartupError: the root cause.
        EngineDeadError: the engine died while serving.
    """
    settings = read_settings(words)
    names = {info.name for info in server_fields()}
    server = server_config({name: value for name, value in settings.items() if name in names})
    engine = engine_config({name: value for name, value in settings.items() if name not in names})
    level = (server.log_level or Env.read().log_level).upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"log_level: {level!r} is not one of {', '.join(LOG_LEVELS)}", phase="configuration")
    configure_logging("Frontend", level)
    # First of all, so that a taken port is known before anything is loaded.
    listener = listen(server)
    try:
        return _serve(engine, server, listener)
    finally:
        listener.close()


def _serve(config: EngineConfig, server: ServerConfig, listener: Listener) -> int:
    timeline = Timeline()
    engine = spawn_engine(read_config(config, timeline), timeline, server.engine_address)
    try:
        start = time.monotonic()
        # Only now: these imports take a while, and the engine is on its way meanwhile.
        from octavo.frontend.http import run

        timeline.add("Frontend", "importing the server", time.monotonic() - start)
        try:
            run.run(engine, server, listener)
        except run.Interrupted as interrupted:
            print(f"octavo: {interrupted}", file=sys.stderr)  # noqa: T201
            return EXIT_SIGNAL + interrupted.number
    finally:
        engine.end()
    return 0


def read_settings(words: list[str]) -> dict[str, Any]:
    """Return all settings: the command line's over the file's.

    Raises:
        ConfigError: the file is wrong, or no model is named.
    """
    parser = config_parser("octavo serve", "Start an OpenAI-compatible server for a model.")
    said = parser.parse_flags(words)
    positional, path = said.pop("positional_model", None), said.pop("config", None)
    if positional is not None:
        if said.get("model", positional) != positional:
            parser.error(f"two models are named: {positional} and {said['model']}")
        said["model"] = positional
    settings = (read_config_file(path) if path else {}) | said
    if "model" not in settings:
        parser.error("which model? Name a directory, a .gguf file or a hub id")
    return settings
