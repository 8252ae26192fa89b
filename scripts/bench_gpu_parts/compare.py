"""Compares a run with the last recorded run: which figures changed, and by how much."""

import json
from pathlib import Path
from typing import Any

from bench_cpu_parts.figures import Results

NOTABLE = 0.02
"""Smallest relative change that is reported; smaller ones are noise."""


def load(path: Path) -> dict[str, Any] | None:
    """Return a recorded report; `None` if there is none."""
    if not path.exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def changes(recorded: dict[str, Any], results: Results) -> list[str]:
    """Return a line for each figure that changed notably, and one for all others."""
    lines, num_same = [], 0
    rows: dict[str, Any] = recorded["results"]["rows"]
    for key, metric in results.metrics.items():
        for column, before in rows.get(key, {}).get("engines", {}).items():
            now = results.median(metric, column) if column in results.figures[key] else None
            if now is None or not before["median"]:
                continue
            change = now / before["median"] - 1
            if abs(change) < NOTABLE:
                num_same += 1
                continue
            word = "better" if (change > 0) == metric.is_higher_better else "worse"
            was = f"{before['median']:,.{metric.digits}f}"
            lines.append(
                f"{metric.title}, {column}: {was} -> {now:,.{metric.digits}f} {metric.unit}, {change:+.1%}: {word}"
            )
    return [*lines, f"{num_same} figures are within {NOTABLE:.0%} of those of {recorded['date']}"]
