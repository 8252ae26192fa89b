"""Shared by the benchmarks: description of the machine, percentiles, report."""

import datetime
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Smaller ids are special or byte tokens in the vocabularies we know; larger ones may not exist.
MIN_TOKEN_ID = 300
MAX_TOKEN_ID = 30_000


def random_prompt(rng: random.Random, num_tokens: int, max_token_id: int = MAX_TOKEN_ID) -> list[int]:
    """Return random token ids, so that prompts share no prefix."""
    return [rng.randint(min(MIN_TOKEN_ID, max_token_id), max_token_id) for _ in range(num_tokens)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, p90 and p99 (nearest rank) of the values; {} when there are none."""
    if not values:
        return {}
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1]

    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "median": rank(0.5), "p90": rank(0.9), "p99": rank(0.99)}


def report(name: str, settings: dict[str, Any], results: Any) -> dict[str, Any]:
    """Return the results together with date, machine and command."""
    return {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([f"scripts/{name}", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "settings": settings,
        "results": results,
    }


def write(document: dict[str, Any], path: str | None) -> None:
    """Write the report as JSON, if a file is given."""
    if path:
        # Replaced at once: if this process is killed meanwhile, the file is the one of before.
        partial = Path(f"{path}.partial")
        partial.write_text(json.dumps(document, indent=2) + "\n")
        partial.replace(path)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    if not shutil.which("git"):
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
