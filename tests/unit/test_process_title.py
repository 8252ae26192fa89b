"""What ps and top show of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from core_fakes import core_config

from octavo.protocol.control import CoreSpec, WorkerSpec

SHOW = (
    "import os\nfrom octavo.protocol.process_title import set_process_title\n"
    "set_process_title('worker', '3.12')\n"
    "print(open('/proc/self/comm').read().strip(), open('/proc/self/cmdline').read().rstrip('\\0'), sep='\\0')\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="titles are set on Linux only")
def test_a_title_replaces_the_interpreter_and_keeps_the_module(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    command = [sys.executable, "-m", "shown", "7"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.strip().split("\0") == ["octavo w 3.12", "octavo worker 3.12", "-m", "shown", "7"]


def test_titles_have_the_index_of_the_engine() -> None:
    config = core_config(engine_index=2)
    worker = WorkerSpec(config=config, rank=1, world_size=2, plan_address="", result_address="")
    assert worker.process_title == ("worker", "2.1")
    assert CoreSpec(config=config, address="", run_dir="", epoch=1).process_title == ("core", "2")
