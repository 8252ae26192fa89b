"""Output of benchmarks: tables and JSON files."""

import datetime
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.frontend.cli.errors import CommandError
from octavo.protocol.version import __version__

WIDTH = 52


def print_line(text: str = "") -> None:
    """Print a line of the report."""
    print(text, flush=True)


def print_table(title: str, rows: Iterable[tuple[str, int | float | str]]) -> None:
    """Print a title, and names with values below it."""
    print_line(f"{f' {title} ':=^{WIDTH}}")
    for name, value in rows:
        text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print_line(f"{name:<{WIDTH - 14}}{text:>14}")


def context() -> dict[str, Any]:
    """Return date, version and machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "octavo_version": __version__,
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def write_json(path: str | Path, document: dict[str, Any]) -> None:
    """Write a result to a file and print its name.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    print_line(f"written to {path}")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
