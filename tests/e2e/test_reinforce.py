"""The example of docs/reinforcement-learning.md in short: reward rises, and its checks of bits pass."""

import re
import subprocess
import sys

import pytest
from source_tree import ROOT


@pytest.mark.long
def test_reward_rises() -> None:
    program = [sys.executable, "-P", str(ROOT / "docs" / "reinforcement" / "reinforce.py"), "--steps", "26"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = re.search(r"reward (\S+) at first, (\S+) at last", done.stdout)
    assert found is not None
    assert float(found[2]) > float(found[1]) + 0.3, done.stdout
