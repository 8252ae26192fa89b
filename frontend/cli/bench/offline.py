"""What the benchmarks of an engine share: flags of the engine and of the measurement, told apart, and the result."""

import argparse
from collections.abc import Iterable
from typing import Any

from octavo.frontend.cli.bench.report import context, say_table, write_json
from octavo.frontend.cli.flags import FlagParser, config_parser
from octavo.protocol.config.sources import engine_fields


def bench_parser(name: str, description: str) -> FlagParser:
    """Return a parser for the flags of an engine; those of the measurement are added by `add_bench_flags`.

    Args:
        name: of the benchmark.
        description: of it.
    """
    return config_parser(f"octavo bench {name}", description, has_server=False)


def add_bench_flags(parser: FlagParser, numbers: dict[str, tuple[int, str]]) -> None:
    """Add whole numbers, by flag with default and meaning, and where the figures go."""
    group = parser.add_named_group("bench", "The measurement")
    for flag, (default, text) in numbers.items():
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default: {default}")
    group.add_argument("--output-json", metavar="FILE", help="write the figures here")


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


def tell(
    title: str,
    rows: Iterable[tuple[str, int | float | str]],
    figures: dict[str, Any],
    settings: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Print a table, and write the figures where the flags say.

    Args:
        title: of the table.
        rows: names and values.
        figures: for the file, by vLLM's names.
        settings: of the engine.
        options: of the measurement.

    Raises:
        CommandError: the file cannot be written.
    """
    say_table(title, rows)
    if options.output_json:
        write_json(options.output_json, {**context(), "model_id": settings["model"], **figures})
