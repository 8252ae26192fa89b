"""`scripts/compare_evaluations.py` on files in the format of lm-eval."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

SCRIPT = ROOT / "scripts" / "compare_evaluations.py"


def write(directory: Path, task: str, responses: list[Any], stamp: str = "2026-01-01T00-00-00.0") -> Path:
    (directory / "model").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"doc_id": number, "filtered_resps": response}) for number, response in enumerate(responses)]
    (directory / "model" / f"samples_{task}_{stamp}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def compared(first: Path, second: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, first, second], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("form", [lambda value: value, str], ids=["numbers", "texts of numbers"])
def test_differences_are_named(tmp_path: Path, form: Any) -> None:
    first = write(tmp_path / "a", "choices", [[[form(-1.0), form(True)], [form(-2.0), form(False)]]])
    second = write(tmp_path / "b", "choices", [[[form(-1.5), form(True)], [form(-2.0), form(True)]]])
    write(first, "answers", [["7"], ["one"]])
    write(second, "answers", [["7"], ["other"]])
    assert compared(first, second).splitlines() == [
        "answers: 1 of 2 texts are the same",
        "choices: 2 loglikelihoods, largest difference 0.5 (relative 0.33); 1 of 2 greedy flags are the same",
    ]


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "choices", [[-1.0]]), write(tmp_path / "b", "texts", [[-1.0]])
    assert "no task in common" in compared(first, second)
    write(second, "choices", [[-1.0], [-2.0]])
    assert "did not see the same samples" in compared(first, second)
