"""Reads rows of a local dataset: JSON, JSON lines, CSV or Parquet."""

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.frontend.cli.errors import CommandError

TEXT_COLUMNS = ("prompt", "question", "instruction", "problem", "text", "turns", "conversations", "messages")
"""Names of prompt columns, in order of preference."""

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")


def prompts_in(path: Path, column: str | None) -> Iterator[str]:
    """Yield the prompts of all files below a path, ordered by file name. Rows without a prompt are skipped.

    Args:
        path: a file or a directory.
        column: name of the column with the prompts; None: the first of `TEXT_COLUMNS` in a row.

    Raises:
        CommandError: the file does not exist, or cannot be read.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    if not files:
        raise CommandError(f"no file with one of {', '.join(SUFFIXES)} at {path}")
    for file in files:
        try:
            for row in _rows(file):
                if prompt := _prompt(row, column):
                    yield prompt
        except (OSError, ValueError, csv.Error) as error:
            raise CommandError(f"cannot read {file}: {error}") from None


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    with file.open(encoding="utf-8", newline="") as lines:
        if file.suffix == ".csv":
            yield from csv.DictReader(lines)
            return
        rows = json.load(lines) if file.suffix == ".json" else (json.loads(line) for line in lines if line.strip())
        yield from (row for row in rows if isinstance(row, dict))


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise CommandError(f"{file} requires pyarrow", "pip install pyarrow, or convert it to .jsonl") from None
    for batch in parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _prompt(row: dict[str, Any], column: str | None) -> str:
    """Return a row's prompt: a text, or the first of several turns. Return "" if there is none."""
    columns = TEXT_COLUMNS if column is None else (column,)
    value = next((row[name] for name in columns if row.get(name)), "")
    if isinstance(value, list):
        value = value[0]
    if isinstance(value, dict):
        value = value.get("content") or value.get("value")
    return value if isinstance(value, str) else ""
