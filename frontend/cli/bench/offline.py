"""What the benchmarks of an engine share: flags of the engine and of the measurement, told apart."""

import argparse
from typing import Any

from octavo.frontend.cli.flags import FlagParser
from octavo.protocol.config.sources import engine_fields


def bench_options(parser: FlagParser, words: list[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """Return the engine's settings, the model among them, and the rest of what the command line says.

    Raises:
        ConfigError: the file of settings is wrong.
    """
    said = parser.parse_settings(words)
    names = {info.name for info in engine_fields()}
    settings = {name: value for name, value in said.items() if name in names}
    rest = {name: value for name, value in said.items() if name not in names}
    # Flags with no default of their own are absent where the command line is silent.
    optional = {action.dest: None for action in parser._actions if action.default is argparse.SUPPRESS}
    return settings, argparse.Namespace(**{**optional, **rest})
