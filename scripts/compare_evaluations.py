"""Compares two runs of lm-eval (`--log_samples`) on the same samples: loglikelihoods and generated texts.

Reads the newest `samples_TASK_*.jsonl` of each task below two directories. Evaluates nothing itself: the commands are
in docs/evaluation.md.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = {"True", "False"}
"""Values of the flag that says whether a text is the model's greedy output."""


def main() -> None:
    """Print one line for each task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path, help="the --output_path of one run")
    parser.add_argument("second", type=Path, help="the --output_path of the other run")
    arguments = parser.parse_args()
    first, second = samples(arguments.first), samples(arguments.second)
    tasks = sorted(first.keys() & second.keys())
    if not tasks:
        raise SystemExit("the two runs have no task in common")
    for task in tasks:
        print(f"{task}: {compare(first[task], second[task])}")


def samples(directory: Path) -> dict[str, dict[int, Any]]:
    """Return the responses of each task by the number of the sample, from the newest file of the task."""
    found: dict[str, dict[int, Any]] = {}
    for file in sorted(directory.rglob("samples_*.jsonl"), key=lambda file: file.stat().st_mtime):
        task = file.stem.removeprefix("samples_").rpartition("_")[0]
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[task] = {line["doc_id"]: line["filtered_resps"] for line in lines}
    return found


def compare(first: dict[int, Any], second: dict[int, Any]) -> str:
    """Return how far two runs of a task differ."""
    if first.keys() != second.keys():
        raise SystemExit("the two runs did not see the same samples")
    pairs = [
        pair for number in sorted(first) for pair in zip(leaves(first[number]), leaves(second[number]), strict=True)
    ]
    if not all(is_number(leaf) for pair in pairs for leaf in pair):
        same = sum(a == b for a, b in pairs)
        return f"{same} of {len(pairs)} texts are the same"
    flags = [pair for pair in pairs if set(pair) <= FLAGS]
    numbers = [(float(a), float(b)) for a, b in pairs if not {a, b} <= FLAGS]
    largest = max(abs(a - b) for a, b in numbers)
    relative = max(abs(a - b) / max(abs(a), abs(b), 1e-9) for a, b in numbers)
    line = f"{len(numbers)} loglikelihoods, largest difference {largest:.2g} (relative {relative:.2g})"
    return f"{line}; {sum(a == b for a, b in flags)} of {len(flags)} greedy flags are the same" if flags else line


def leaves(value: Any) -> Iterator[str]:
    """Yield the elements of nested lists, in order, as text: lm-eval also writes some numbers and flags as text."""
    if isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield str(value)


def is_number(text: str) -> bool:
    """Return whether the text is a number."""
    if text in FLAGS:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
