"""The examples in README.md run as they stand, but for the model's path."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from source_tree import ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(code: str, model: Path, folder: Path) -> str:
    path = folder / "example.py"
    path.write_text(code.replace("path/to/model", str(model)))
    done = subprocess.run([sys.executable, path], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_example(model: Path, tmp_path: Path) -> None:
    printed = run(EXAMPLES[0], model, tmp_path)
    assert printed.startswith("The capital of France is")
    assert "\nWater boils at" in printed


def test_application_example(model: Path, tmp_path: Path) -> None:
    imports, _, body = EXAMPLES[1].partition("\n\n")
    main = textwrap.indent(body, "    ")
    assert run(f"import asyncio\n{imports}\nasync def main():\n{main}\nasyncio.run(main())\n", model, tmp_path)


def test_every_example_is_tried() -> None:
    assert len(EXAMPLES) == 2
