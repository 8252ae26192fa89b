"""Parent and child: ready messages, root causes, signals, and no process left behind."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from servers import are_reaped, as_init_process, descendants, is_running, left_after, send_signal
from specs import PYTHONPATH, core_spec
from waiting import read_line, wait_until

from octavo.protocol.control import CoreReady, Hello, PhaseDone, Progress
from octavo.protocol.errors import ConfigError
from octavo.protocol.supervise import Child, ChildExited

TIMEOUT_S = 60.0


@contextlib.contextmanager
def fake_child(behaviour: str, **settings: Any) -> Iterator[Child]:
    child = Child.spawn("fake_child", core_spec(behaviour), "fake", {"PYTHONPATH": PYTHONPATH}, **settings)
    try:
        yield child
    finally:
        child.kill()
        child.stop(timeout_s=5)


def receive_all(child: Child) -> list[object]:
    """Everything until the child is ready or gone."""
    messages: list[object] = []
    while not messages or not isinstance(messages[-1], CoreReady):
        message = child.receive(TIMEOUT_S)
        assert message is not None, "timed out"
        messages.append(message)
    return messages


def test_a_child_is_heard_through_a_descriptor_beyond_those_of_select() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1100
    if limit[1] < 2 * many:
        pytest.skip(f"no more than {limit[1]} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * many, limit[1]))
    taken = [os.dup(0) for _ in range(many)]
    try:
        with fake_child("run") as child:
            assert child.fileno() > 1024
            assert isinstance(receive_all(child)[-1], CoreReady)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_child_logs_by_its_configuration(tmp_path: Path) -> None:
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "log"), "formatter": "json"}
    config = {
        "formatters": {"json": {"()": "octavo.protocol.log.JsonLines"}},
        "handlers": {"lines": handler},
        "loggers": {"octavo": {"level": "INFO", "handlers": ["lines"], "propagate": False}},
    }
    spec = msgspec.structs.replace(core_spec("crash later"), log_config=json.dumps(config))
    child = Child.spawn("fake_child", spec, "fake", {"PYTHONPATH": PYTHONPATH})
    with pytest.raises(ChildExited):
        while child.receive(TIMEOUT_S):
            pass
    child.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    fields = json.loads(line)
    assert (fields["process"], fields["pid"], fields["message"]) == ("Fake", child.pid, "Fake failed")
    assert fields["exception"].endswith("ZeroDivisionError: oops")


def test_status_messages_arrive_in_order() -> None:
    with fake_child("run") as child:
        messages = receive_all(child)
    assert [type(message) for message in messages] == [Hello, Progress, PhaseDone, CoreReady]
    assert messages[0].pid == child.pid
    assert (messages[2].process, messages[2].phase) == ("Fake", "first phase")


def test_a_failed_start_carries_its_root_cause() -> None:
    with fake_child("fail") as child, pytest.raises(ChildExited) as caught:
        receive_all(child)
    error = caught.value.as_startup_error("starting")
    assert isinstance(error, ConfigError)
    assert (error.message, error.hint, error.phase) == ("the model is upside down", "turn it round", "second phase")
    assert caught.value.code == 3


def test_an_unexpected_exception_is_named_with_its_type_and_traceback() -> None:
    with fake_child("crash") as child, pytest.raises(ChildExited) as caught:
        receive_all(child)
    error = caught.value.as_startup_error("starting")
    assert error.message == "ZeroDivisionError: oops"
    assert "fake_child.py" in error.details


def test_a_child_that_is_killed_says_which_signal() -> None:
    with fake_child("die") as child, pytest.raises(ChildExited, match="SIGKILL"):
        receive_all(child)


def test_a_failure_after_the_start_is_an_exit_code() -> None:
    with fake_child("crash later") as child:
        receive_all(child)
        with pytest.raises(ChildExited, match="exited with code 1"):
            child.receive(TIMEOUT_S)


def test_two_sigterms_are_counted_and_sigint_is_ignored() -> None:
    with fake_child("run") as child:
        receive_all(child)
        os.kill(child.pid, signal.SIGINT)
        send_signal(child.pid, signal.SIGTERM)
        assert child.wait(0.3) is None
        child.terminate()
        assert child.wait(TIMEOUT_S) == 7


def test_stop_kills_a_child_that_does_not_listen() -> None:
    with fake_child("ignore sigterm") as child:
        receive_all(child)
        assert child.stop(timeout_s=0.3) == -signal.SIGKILL


def test_what_a_dead_child_leaves_behind_is_reaped() -> None:
    with as_init_process(), fake_child("parent", leads_group=True) as child:
        receive_all(child)
        orphans = descendants(child.pid)
        assert len(orphans) == 1
        child.kill()
        child.stop(timeout_s=0)
        assert is_running(orphans[0]), "its end is not waited for"
        os.kill(orphans[0], signal.SIGKILL)
        wait_until(lambda: are_reaped(orphans))


def test_nothing_in_time_is_none() -> None:
    with fake_child("run") as child:
        receive_all(child)
        assert child.receive(timeout_s=0.05) is None


def test_closing_the_pipe_ends_the_child() -> None:
    with fake_child("run") as child:
        receive_all(child)
        child.close()
        assert child.wait(TIMEOUT_S) == 4


def test_a_child_does_not_outlive_a_killed_parent() -> None:
    program = textwrap.dedent("""
        import time
        from octavo.protocol.control import CoreReady
        from octavo.protocol.supervise import Child
        from specs import PYTHONPATH, core_spec
        child = Child.spawn("fake_child", core_spec("ignore sigterm"), "fake", {"PYTHONPATH": PYTHONPATH})
        while not isinstance(child.receive(20), CoreReady):
            pass
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        pid = int(read_line(parent.stdout))
        parent.kill()
        assert not left_after([pid])


def test_a_child_notices_that_its_parent_died_before_the_handshake() -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-P", "-m", "fake_child", str(writer)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writer], env=environment)
    os.close(writer)
    assert process.stdin is not None
    process.stdin.close()  # no spec ever comes
    assert process.wait(TIMEOUT_S) == 3
    os.close(reader)
