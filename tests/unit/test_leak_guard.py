"""The guard against leaked processes detects one."""

import subprocess
import sys
from pathlib import Path

from leaks import kill, leaked_processes
from waiting import TIMEOUT_S, read_line

from octavo.protocol.env import child_environment


def test_sees_and_ends_an_orphan_of_the_marked_run() -> None:
    # The argument stands for the module's name in a real child's command line.
    sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "octavo.core_proc"]
    environment = child_environment({"OCTAVO_TEST_SESSION": "one-of-its-kind"})
    with subprocess.Popen(sleeper, env=environment, stdout=subprocess.PIPE) as child:
        assert read_line(child.stdout)
        found = leaked_processes("OCTAVO_TEST_SESSION=one-of-its-kind", timeout_s=0.0)
        assert list(found) == [child.pid]
        assert leaked_processes("OCTAVO_TEST_SESSION=another", timeout_s=0.0) == {}
        kill([child.pid])
    assert leaked_processes("OCTAVO_TEST_SESSION=one-of-its-kind", timeout_s=0.0) == {}


def test_killing_what_has_ended_is_no_error(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], cwd=tmp_path)
    child.wait(TIMEOUT_S)
    kill([child.pid])
    assert child.returncode == 0, "it ended by itself"
