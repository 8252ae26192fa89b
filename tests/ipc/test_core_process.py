"""The core as a process: its start, its frontends, its signals and its failures, over workers without a model."""

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from core_client import CoreUnderTest, SocketClient, running_core
from core_fakes import alone, core_config
from waiting import wait_until

from octavo.core_proc.recorder import read_recording, replay
from octavo.core_proc.workers.local import LocalWorkerGroup
from octavo.protocol.adapters import Adapter
from octavo.protocol.codec import request_codec
from octavo.protocol.control import Hello, PhaseDone, Progress, StartupFailed
from octavo.protocol.errors import StartupError
from octavo.protocol.events import (
    BoolResult,
    CallFailed,
    EngineDying,
    Events,
    FailureKind,
    Finished,
    FinishReason,
    Refused,
    Reply,
    StatsReport,
)
from octavo.protocol.ids import pack_ids
from octavo.protocol.lifecycle import EXIT_STARTUP_FAILED
from octavo.protocol.params import PoolingSpec, SamplingSpec
from octavo.protocol.pulse import PulseReader
from octavo.protocol.requests import Abort, Call, Connect, GetStats, ResetPrefixCache, StartProfile, StopProfile, Submit
from octavo.protocol.stats import EngineStats
from octavo.protocol.supervise import ChildExited

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def core(tmp_path: Path):
    with running_core(tmp_path) as core:
        yield core


def test_start_reports_every_phase_of_every_process(core: CoreUnderTest):
    assert isinstance(core.messages[0], Hello)
    phases = [(m.process, m.phase) for m in core.messages if isinstance(m, PhaseDone)]
    assert ("Worker 0", "loading weights") in phases
    assert {phase for process, phase in phases if process == "Core"} == {
        "binding sockets",
        "identifying the weights",
        "starting workers",
        "allocating the KV cache",
        "warming up",
    }
    assert any(isinstance(message, Progress) for message in core.messages)


def test_requests_of_two_frontends_with_the_same_name(core: CoreUnderTest):
    with SocketClient(core.address) as first, SocketClient(core.address) as second:
        facts = first.connect()
        second.connect()
        assert (facts.epoch, facts.block_size, facts.max_model_len) == (7, 4, 64)
        first.submit("same", PROMPT, 20)
        second.submit("same", [*PROMPT, 6], 10)
        first.finish("same")
        second.finish("same")
        assert first.token_ids("same") == alone(PROMPT, 20).token_ids
        assert second.token_ids("same") == alone([*PROMPT, 6], 10).token_ids
        assert first.request_events("same")[-1].reason is FinishReason.LENGTH
        assert all(event.epoch == 7 for event in first.received if isinstance(event, Events))


def test_every_rank_gets_every_message_and_one_answers(tmp_path: Path):
    with running_core(tmp_path, world_size=2) as core, SocketClient(core.address) as client:
        client.connect()
        client.submit("r", PROMPT, 20)
        client.send(Call(1, StartProfile(str(tmp_path))))
        client.receive_until(lambda event: isinstance(event, Reply))
        client.finish("r")
        assert client.token_ids("r") == alone(PROMPT, 20).token_ids
        assert {m.process for m in core.messages if isinstance(m, PhaseDone)} == {"Core", "Worker 0", "Worker 1"}
        os.kill(core.child.pid, signal.SIGTERM)
        assert core.wait_for_exit() == 0


def test_a_trace_that_a_rank_cannot_write_is_told_and_nothing_else_ends(tmp_path: Path):
    with running_core(tmp_path, "full", world_size=2) as core, SocketClient(core.address) as client:
        client.connect()
        client.send(Call(1, StopProfile()))
        client.receive_until(lambda event: isinstance(event, Reply))
        assert Reply(1, CallFailed("worker 1: the disk is full")) in client.received
        client.submit("r", PROMPT, 5)
        client.finish("r")
        assert client.token_ids("r") == alone(PROMPT, 5).token_ids


def test_an_adapter_that_is_not_there_is_rejected(core: CoreUnderTest):
    with SocketClient(core.address) as client:
        client.connect()
        client.send(
            Submit("r", pack_ids(PROMPT), SamplingSpec(max_tokens=1, seed=0), adapter=Adapter("sql", "d", "/sql", 8))
        )
        client.finish("r")
        end = client.request_events("r")[-1]
        assert (end.kind, end.param) == (FailureKind.INVALID, "model")


def test_another_protocol_version_is_rejected(core: CoreUnderTest):
    with SocketClient(core.address) as client:
        client.send(Connect(version=99))
        rejected = client.receive_until(lambda event: isinstance(event, Refused))
        assert "99" in rejected.message


def test_a_request_for_a_vector_is_rejected_and_others_go_on(core: CoreUnderTest):
    with SocketClient(core.address) as client:
        client.connect()
        client.send(Submit("vector", pack_ids(PROMPT), PoolingSpec("embed")))
        client.submit("r", PROMPT)
        client.finish("vector", "r")
        (failed,) = client.request_events("vector")
        assert (failed.kind, failed.param) == (FailureKind.INVALID, "task")
        assert isinstance(client.request_events("r")[-1], Finished)


def test_a_request_before_connect_is_rejected(core: CoreUnderTest):
    with SocketClient(core.address) as client:
        client.submit("r", PROMPT)
        assert "Connect" in client.receive_until(lambda event: isinstance(event, Refused)).message


def test_a_malformed_request_that_has_a_name_is_answered(core: CoreUnderTest):
    with SocketClient(core.address) as client:
        client.connect()
        (frame,) = request_codec().encode(Submit("bad", pack_ids(PROMPT), SamplingSpec(max_tokens=4, seed=0)))
        client.send_frames(frame[:-5])
        client.send_frames(frame.replace(b"bad", b"odd") + b"\x00")
        client.send_frames(b"\x01" + msgspec.msgpack.encode(["submit", "ugly", "no list", None]))
        client.send_frames(b"\x01" + msgspec.msgpack.encode(["call", 300, ["no_such_call"]]))
        client.finish("bad", "odd", "ugly")
        for name in ("bad", "odd", "ugly"):
            (failed,) = client.request_events(name)
            assert failed.kind is FailureKind.INVALID and "cannot be read" in failed.message
        if not any(isinstance(event, Reply) for event in client.received):
            client.receive_until(lambda event: isinstance(event, Reply))
        (reply,) = [event for event in client.received if isinstance(event, Reply)]
        assert reply.call_id == 300 and isinstance(reply.result, CallFailed)


def test_a_malformed_request_does_not_end_the_live_one_of_its_name(tmp_path: Path):
    with running_core(tmp_path, "slow") as core, SocketClient(core.address) as client:
        client.connect()
        client.submit("r", PROMPT, 20)
        client.receive_until(lambda event: isinstance(event, Events))
        client.send_frames(b"\x01" + msgspec.msgpack.encode(["submit", "r", "no list"]))
        client.finish("r")
        assert client.token_ids("r") == alone(PROMPT, 20).token_ids


def test_malformed_frames_are_counted_and_dropped(core: CoreUnderTest):
    with SocketClient(core.address) as client:
        client.connect()
        client.send_frames(b"\x01", b"garbage")
        client.send_frames(b"\x01garbage")
        client.send_frames(b"\x09")
        client.send_frames(b"")
        client.send(Call(1, GetStats()))
        reply = client.receive_until(lambda event: isinstance(event, Reply))
        assert isinstance(reply.result, EngineStats)
        assert reply.result.malformed_frames == 4
        client.submit("r", PROMPT)
        client.finish("r")


@pytest.mark.parametrize("name", ["file/traces", "null\0character"])
def test_a_profile_without_a_place_fails_alone(core: CoreUnderTest, tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    with SocketClient(core.address) as client:
        client.connect()
        client.send(Call(1, StartProfile(str(tmp_path / name))))
        reply = client.receive_until(lambda event: isinstance(event, Reply))
        assert isinstance(reply.result, CallFailed) and "cannot make the directory" in reply.result.message
        client.submit("r", PROMPT)
        client.finish("r")
        assert client.token_ids("r") == alone(PROMPT).token_ids


def test_utility_calls(core: CoreUnderTest, tmp_path: Path):
    with SocketClient(core.address) as client:
        client.connect()
        client.submit("r", PROMPT, 10)
        client.finish("r")
        for call_id, utility in enumerate([ResetPrefixCache(), StartProfile(str(tmp_path)), StopProfile()]):
            client.send(Call(call_id, utility))
            reply = client.receive_until(lambda event: isinstance(event, Reply))
            assert reply == Reply(call_id, BoolResult(True))
        client.submit("again", PROMPT, 10)
        client.finish("again")
        assert client.request_events("again")[-1].num_cached_tokens == 0
        assert any(isinstance(event, StatsReport) for event in client.received)


def test_abort_ends_with_finished(tmp_path: Path):
    with running_core(tmp_path, "slow") as core, SocketClient(core.address) as client:
        client.connect()
        client.submit("r", PROMPT, 50)
        client.receive_until(lambda event: isinstance(event, Events))
        client.send(Abort(["r"]))
        client.finish("r")
        assert client.request_events("r")[-1].reason is FinishReason.ABORT


def test_requests_of_a_lost_frontend_are_aborted(tmp_path: Path):
    with running_core(tmp_path, "slow") as core, SocketClient(core.address) as watcher:
        watcher.connect()
        with SocketClient(core.address) as client:
            client.connect()
            client.submit("r", PROMPT, 55)
            client.receive_until(lambda event: isinstance(event, Events))
        idle = watcher.receive_until(lambda event: isinstance(event, StatsReport) and event.stats.num_running == 0)
        assert idle.stats.generation_tokens < 55
        assert idle.stats.num_free_blocks == idle.stats.num_blocks


def test_sigterm_drains(tmp_path: Path):
    with running_core(tmp_path, "slow") as core, SocketClient(core.address) as client:
        client.connect()
        client.submit("running", PROMPT, 30)
        client.receive_until(lambda event: isinstance(event, Events))
        os.kill(core.child.pid, signal.SIGTERM)
        while not (rejected := client.request_events("late")):
            client.submit("late", PROMPT)
            client.receive_until(lambda event: isinstance(event, Events))
            if isinstance((client.request_events("late") or [None])[-1], Finished):
                client.received = [e for e in client.received if not isinstance(e, Events)]
        assert rejected
        client.finish("running")
        assert client.token_ids("running")[-1] == alone(PROMPT, 30).token_ids[-1]
        dying = client.receive_until(lambda event: isinstance(event, EngineDying))
        assert dying.message == ""
        assert core.wait_for_exit() == 0


def test_a_second_sigterm_aborts(tmp_path: Path):
    with running_core(tmp_path, "slow") as core, SocketClient(core.address) as client:
        client.connect()
        client.submit("r", PROMPT, 55)
        client.receive_until(lambda event: isinstance(event, Events))
        os.kill(core.child.pid, signal.SIGTERM)
        client.receive_until(lambda event: isinstance(event, Events))
        os.kill(core.child.pid, signal.SIGTERM)
        client.finish("r")
        assert client.request_events("r")[-1].reason is FinishReason.ABORT
        assert core.wait_for_exit() == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no start", "worker 2: the model file is wrong"),
        ("crowded", "worker 2: no memory for 9 weights"),
        ("killed", "worker 2 was killed by SIGKILL"),
        ("vanish", "worker 2 exited with code 9"),
    ],
)
def test_a_failed_start_names_the_rank(tmp_path: Path, fault: str, message: str) -> None:
    core = CoreUnderTest(tmp_path, f"last: {fault}", world_size=3)
    with pytest.raises(ChildExited) as caught:
        core.wait_until_ready()
    assert str(caught.value) == message
    assert caught.value.failure.phase == "loading weights"
    core.child.close()


def test_the_root_cause_is_that_of_the_rank_that_failed_by_itself() -> None:
    class Failed:
        def __init__(self, *exited: object) -> None:
            self.exited = exited

        def receive(self, timeout_s: float) -> None:
            raise ChildExited(*self.exited)

    def group_of(*children: Failed) -> LocalWorkerGroup:
        group = LocalWorkerGroup.__new__(LocalWorkerGroup)
        group._children, group._phases = dict(enumerate(children)), {}
        group._config = core_config(world_size=len(children))
        return group

    lost = StartupFailed("loading weights", "RuntimeError", "connection closed by peer", "", "")
    wrong = StartupFailed("loading weights", "ConfigError", "the model file is wrong", "fetch it again", "")
    for second, message in [
        (Failed("worker 1", 1, wrong), "worker 1: the model file is wrong"),
        (Failed("worker 1", -9, None), "worker 1 was killed by SIGKILL"),
    ]:
        with pytest.raises(StartupError) as raised:
            group_of(Failed("worker 0", 1, lost), second)._receive_progress(None)
        assert raised.value.message == message


@pytest.mark.parametrize(
    ("fault", "message", "phase"),
    [
        ("no start", "the model file is wrong", "loading weights"),
        ("vanish", "worker 0 exited with code 9", "loading weights"),
        ("cold", "worker 0: NotEnoughMemoryError: no memory for graphs", "warming up"),
    ],
)
def test_a_failed_start_has_the_workers_root_cause(tmp_path: Path, fault: str, message: str, phase: str):
    core = CoreUnderTest(tmp_path, fault)
    with pytest.raises(ChildExited) as caught:
        core.wait_until_ready()
    assert str(caught.value) == message
    assert caught.value.code == EXIT_STARTUP_FAILED
    assert caught.value.failure.phase == phase
    core.child.close()


def test_every_rank_warms_up_before_the_engine_is_ready(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with running_core(tmp_path, world_size=2):
        pass
    log = capfd.readouterr().err  # only now: reading it while the core writes loses lines
    for rank in range(2):
        assert f"worker {rank} captured 3 CUDA graphs in 0.5 s: they take 1 MiB, and 0 MiB were planned" in log


def test_too_little_memory_names_the_flag(tmp_path: Path):
    core = CoreUnderTest(tmp_path, max_model_len=1024)
    with pytest.raises(ChildExited) as caught:
        core.wait_until_ready()
    assert caught.value.failure.error_type == "NotEnoughMemoryError"
    assert "--max-model-len 684" in caught.value.failure.hint
    core.child.close()


def test_an_address_that_cannot_be_bound_fails_before_any_worker_starts(tmp_path: Path):
    (tmp_path / "core").mkdir()
    core = CoreUnderTest(tmp_path)
    with pytest.raises(ChildExited, match="cannot bind") as caught:
        core.wait_until_ready()
    assert caught.value.failure.phase == "binding sockets"
    core.child.close()


def test_sigterm_while_starting_ends_the_core(tmp_path: Path):
    core = CoreUnderTest(tmp_path)
    assert isinstance(core.child.receive(20), Hello)
    core.child.terminate()
    assert core.wait_for_exit() in (0, EXIT_STARTUP_FAILED)
    core.child.close()


def test_an_idle_core_sleeps(core: CoreUnderTest, tmp_path: Path):
    """A loop that polls would wake up all the time."""
    with SocketClient(core.address) as client:
        client.connect()
        client.submit("r", PROMPT)
        client.finish("r")
        client.receive_until(lambda event: isinstance(event, StatsReport) and not event.stats.num_running)

        def sleeps() -> bool:
            num_before = num_wake_ups(core.child.pid)
            time.sleep(0.5)
            return num_wake_ups(core.child.pid) - num_before <= 2

        wait_until(sleeps)
        assert not PulseReader(tmp_path / "pulse").read().has_work


def num_wake_ups(pid: int) -> int:
    """Return how often the main thread of a process has gone to sleep."""
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_a_recording_of_the_process_replays(tmp_path: Path):
    path = tmp_path / "steps"
    with running_core(tmp_path, record_steps=str(path)) as core, SocketClient(core.address) as client:
        client.connect()
        for index in range(6):
            client.submit(str(index), [index, *PROMPT], 20)
        client.send(Abort(["3"]))
        client.finish(*map(str, range(6)))
        os.kill(core.child.pid, signal.SIGTERM)
        assert core.wait_for_exit() == 0
    result = replay(read_recording(path))
    assert result.is_identical
    assert result.num_plans >= 20
