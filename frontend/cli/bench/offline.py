"""Shared by the offline benchmarks: flags of engine and measurement, and the report."""

import argparse
from collections.abc import Iterable
from typing import Any

from octavo.frontend.cli.bench.report import context, print_table, write_json
from octavo.frontend.cli.flags import FlagParser, config_parser
from octavo.protocol.config.sources import engine_fields


def bench_parser(name: str, description: str) -> FlagParser:
    """Return a parser with the engine's flags. `add_bench_flags` adds those of the measurement.

    Args:
        name: the name of the benchmark.
        description: description of the benchmark.
    """
    return config_parser(f"octavo bench {name}", description, has_server=False)


def add_bench_flags(parser: FlagParser, numbers: dict[str, tuple[int, str]]) -> None:
    """Add integer flags from a mapping of flags to (default, help), and the flag for the result file."""
    group = parser.add_named_group("bench", "The measurement")
    for flag, (default, text) in numbers.items():
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}; default: {default}")
    group.add_argument("--output-json", metavar="FILE", help="write the result to this file")


def bench_options(parser: FlagParser, argv: list[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """Return the engine's settings, including the model, and the options of the measurement.

    Raises:
        ConfigError: the settings file is invalid.
    """
    given = parser.parse_settings(argv)
    names = {info.name for info in engine_fields()}
    settings = {name: value for name, value in given.items() if name in names}
    rest = {name: value for name, value in given.items() if name not in names}
    # Flags without a default are absent if the command line does not have them.
    optional = {action.dest: None for action in parser._actions if action.default is argparse.SUPPRESS}
    return settings, argparse.Namespace(**{**optional, **rest})


def show_result(
    title: str,
    rows: Iterable[tuple[str, int | float | str]],
    figures: dict[str, Any],
    settings: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Print a table, and write the result file if one is requested.

    Args:
        title: the title of the table.
        rows: names and values.
        figures: the content of the file, with vLLM's names.
        settings: the settings of the engine.
        options: the options of the measurement.

    Raises:
        CommandError: the file cannot be written.
    """
    print_table(title, rows)
    if options.output_json:
        write_json(options.output_json, {**context(), "model_id": settings["model"], **figures})
