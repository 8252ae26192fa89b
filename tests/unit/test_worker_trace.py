"""Traces of steps: a full disk loses the trace, but not the worker."""

from pathlib import Path

import pytest

from octavo.worker_proc.executor import trace as trace_module
from octavo.worker_proc.executor.trace import StepTrace


def test_a_full_disk_costs_the_trace_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module.time, "time_ns", lambda: 7)
    full = tmp_path / "worker-0-7.trace.json"
    full.symlink_to("/dev/full")
    trace = StepTrace(0)
    trace.start(tmp_path, programs=())
    with pytest.raises(OSError, match="No space left"):
        trace.stop()
    assert not full.is_symlink(), "what is cut short is removed"
    trace.start(tmp_path, programs=())
    trace.stop()
    assert full.is_file()


def test_a_profile_that_cannot_be_written_is_logged(tmp_path: Path) -> None:
    trace = StepTrace(0)
    trace.start(tmp_path / "traces", None)
    (tmp_path / "traces").rmdir()
    with pytest.raises(OSError, match="No such file"):
        trace.stop()
