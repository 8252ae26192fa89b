"""Workers that die, hang or never come back: what their core makes of it, over workers without a model.

Every request must give what it gives alone, whatever happens to its workers on the way.
"""

import os
import signal
from pathlib import Path

import pytest
from core_client import CoreUnderTest, SocketClient, running_core
from core_fake_worker import POISON
from core_fakes import alone
from servers import send_signal
from waiting import wait_until

from octavo.core_proc.log_entries import WorkersLost
from octavo.core_proc.recorder import read_recording, replay
from octavo.protocol.config import RecoveryConfig
from octavo.protocol.events import (
    BoolResult,
    CallFailed,
    EngineDying,
    Events,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Reply,
    StatsReport,
    Tokens,
)
from octavo.protocol.lifecycle import EXIT_STARTUP_FAILED
from octavo.protocol.pulse import PulseReader
from octavo.protocol.requests import Abort, Call, GetStats, StartProfile
from octavo.protocol.stats import EngineStats

PROMPT = [1, 2, 3, 4, 5]


def stats_of(client: SocketClient) -> EngineStats:
    client.received = [event for event in client.received if not isinstance(event, Reply)]
    client.send(Call(99, GetStats()))
    reply = client.receive_until(lambda event: isinstance(event, Reply) and event.call_id == 99)
    assert isinstance(reply.result, EngineStats)
    return reply.result


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def submit_some(client: SocketClient, num_requests: int = 12) -> dict[str, tuple[list[int], int]]:
    """Submit requests with common and different beginnings; return prompts and lengths by name."""
    asked = {str(index): ([*PROMPT, *[index] * (index % 4)], 20 + index) for index in range(num_requests)}
    for name, (prompt, max_tokens) in asked.items():
        client.submit(name, prompt, max_tokens, logprobs=0, prompt_logprobs=0, skip_reading_prefix_cache=True)
    return asked


def check_undisturbed(client: SocketClient, asked: dict[str, tuple[list[int], int]]) -> None:
    """Each request has ended once, with what it gives alone: tokens, logprobs and the prompt's logprobs."""
    client.finish(*asked)
    for name, (prompt, max_tokens) in asked.items():
        expected = alone(prompt, max_tokens, logprobs=0, prompt_logprobs=0, skip_reading_prefix_cache=True)
        events = client.request_events(name)
        tokens = [event for event in events if isinstance(event, Tokens)]
        assert client.token_ids(name) == expected.token_ids
        assert [entry for event in tokens for entry in event.logprobs or []] == expected.logprobs
        assert [e.prompt_logprobs for e in tokens if e.prompt_logprobs is not None] == [expected.prompt_logprobs]
        assert [type(event) for event in events].count(Finished) == 1


def is_suspended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def end_time_limit_of_hung_step(client: SocketClient, core: int) -> None:
    """Wait until the worker hangs, and let the core notice: see `core_fake_main`."""
    wait_until(lambda: all(map(is_suspended, children_of(core))))

    def is_noticed() -> int:
        os.kill(core, signal.SIGUSR1)
        return stats_of(client).worker_failures.get("hung", 0)

    wait_until(is_noticed)


@pytest.mark.parametrize("fault", ["raise", "die", "die later", "hang", "second try"])
@pytest.mark.parametrize("depth", [True, False], ids=["ahead", "lockstep"])
def test_requests_go_on_when_workers_fail(tmp_path: Path, fault: str, depth: bool):
    with running_core(tmp_path, fault, async_scheduling=depth) as core, SocketClient(core.address) as client:
        client.connect()
        asked = submit_some(client)
        if fault == "hang":
            end_time_limit_of_hung_step(client, core.child.pid)
        if fault == "second try":
            client.receive_until(lambda event: isinstance(event, Events))
            os.kill(children_of(core.child.pid)[0], signal.SIGKILL)
        check_undisturbed(client, asked)
        stats = stats_of(client)
        cause = {"raise": "raised", "hang": "hung"}.get(fault, "exited")
        assert stats.worker_failures[cause] >= 1
        assert stats.worker_failures.get("not_started", 0) == (fault == "second try")
        assert stats.requests_resumed >= 1
        assert stats.last_worker_pause_s > 0
        assert stats.num_free_blocks == stats.num_blocks
        os.kill(core.child.pid, signal.SIGTERM)
        assert core.wait_for_exit() == 0


def test_all_ranks_start_again_when_a_silent_one_dies(tmp_path: Path):
    with running_core(tmp_path, "die", world_size=2) as core, SocketClient(core.address) as client:
        client.connect()
        check_undisturbed(client, submit_some(client, 4))
        wait_until(lambda: stats_of(client).worker_failures.get("exited"))  # nobody waits for the silent rank's steps
        wait_until(lambda: len(children_of(core.child.pid)) == 2)


def test_workers_that_live_for_five_steps_are_enough(tmp_path: Path):
    """Nobody is to blame: each life of the workers brings everybody a little further."""
    with running_core(tmp_path, "mortal") as core, SocketClient(core.address) as client:
        client.connect()
        asked = {str(index): ([*PROMPT, index], 9) for index in range(3)}
        for name, (prompt, max_tokens) in asked.items():
            client.submit(name, prompt, max_tokens)
        client.finish(*asked)
        assert {name: client.token_ids(name) for name in asked} == {
            name: alone(*arguments).token_ids for name, arguments in asked.items()
        }


def outputs_of(client: SocketClient, asked: dict[str, tuple[list[int], int]]) -> dict[str, int]:
    """Return how many tokens have come of each request that has not ended, in the order of arrival."""
    return {name: len(client.token_ids(name)) for name in asked if not client.has_ended(name)}


def wait_for_progress(client: SocketClient, asked: dict[str, tuple[list[int], int]], num_seqs: int) -> None:
    """Receive until each request that may run has ended, or has got past where its workers were lost.

    That place is at most two tokens further than what had been said by then, as two steps are in flight. Who kills
    twice in between makes a request look guilty (docs/stress.md).
    """
    before = outputs_of(client, asked)
    running = list(before)[:num_seqs]

    def has_progressed(name: str) -> bool:
        return client.has_ended(name) or len(client.token_ids(name)) >= before[name] + 2

    while not all(map(has_progressed, running)):
        client.receive_until(lambda event: isinstance(event, Events))


def test_killed_again_and_again(tmp_path: Path):
    num_kills, num_seqs = 5, 4
    with running_core(tmp_path, "slow", max_num_seqs=num_seqs) as core, SocketClient(core.address) as client:
        client.connect()
        asked = submit_some(client)
        for number in range(num_kills):
            wait_for_progress(client, asked, num_seqs)
            assert len(outputs_of(client, asked)) >= num_seqs, "it was over before the last kill"
            for worker in children_of(core.child.pid):
                os.kill(worker, signal.SIGKILL)
            wait_until(lambda seen=number: sum(stats_of(client).worker_failures.values()) != seen)
        check_undisturbed(client, asked)
        stats = stats_of(client)
        assert stats.worker_failures == {"exited": num_kills}
        assert stats.requests_resumed == num_kills * num_seqs
        assert len(list(tmp_path.glob("plans-*"))) == len(list(tmp_path.glob("results-*"))) == 1


def test_the_core_serves_while_its_workers_start(tmp_path: Path):
    """The second group never becomes ready: whatever is answered is answered without workers."""
    with (
        running_core(tmp_path, "stay") as core,
        SocketClient(core.address) as client,
        SocketClient(core.address) as other,
    ):
        client.connect()
        os.kill(children_of(core.child.pid)[0], signal.SIGKILL)
        wait_until(lambda: stats_of(client).worker_failures)
        assert other.connect().epoch == 7
        for name in ("kept", "given up"):
            client.submit(name, PROMPT, 50)
        client.send(Abort(["given up"]))
        client.finish("given up")
        assert client.request_events("given up")[-1].reason is FinishReason.ABORT
        stats = stats_of(client)
        assert (stats.num_running, stats.num_waiting) == (0, 1)
        client.send(Call(1, StartProfile(str(tmp_path))))
        reply = client.receive_until(lambda event: isinstance(event, Reply) and event.call_id == 1)
        assert reply.result == CallFailed("the workers are restarting; try again later")
        assert PulseReader(tmp_path / "pulse").read().has_work, "nobody may believe that it is well"
        (sleeper,) = children_of(core.child.pid)
        os.kill(sleeper, signal.SIGKILL)
        client.finish("kept")
        assert client.token_ids("kept") == alone(PROMPT, 50).token_ids


def test_a_call_that_the_workers_owe_an_answer_gets_one(tmp_path: Path):
    with running_core(tmp_path) as core, SocketClient(core.address) as client:
        client.connect()
        (worker,) = children_of(core.child.pid)
        os.kill(worker, signal.SIGSTOP)
        client.send(Call(1, StartProfile(str(tmp_path))))
        stats_of(client)
        os.kill(worker, signal.SIGKILL)
        reply = client.receive_until(lambda event: isinstance(event, Reply) and event.call_id == 1)
        assert isinstance(reply.result, CallFailed) and "SIGKILL" in reply.result.message


def test_a_core_whose_workers_die_while_it_is_idle_goes_on(tmp_path: Path):
    with running_core(tmp_path) as core, SocketClient(core.address) as client:
        client.connect()
        (worker,) = children_of(core.child.pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: children_of(core.child.pid) not in ([], [worker]))
        client.submit("r", PROMPT, 10)
        client.finish("r")
        assert client.token_ids("r") == alone(PROMPT, 10).token_ids
        assert stats_of(client).requests_resumed == 0


def test_requests_that_kill_fail_alone(tmp_path: Path):
    with (
        running_core(tmp_path, "poison", recovery=RecoveryConfig(max_worker_restarts=20)) as core,
        SocketClient(core.address) as client,
    ):
        client.connect()
        asked = submit_some(client, 6)
        for name in ("bad", "worse"):
            client.submit(name, [*PROMPT, POISON], 10)
        check_undisturbed(client, asked)
        client.finish("bad", "worse")
        for name in ("bad", "worse"):
            end = client.request_events(name)[-1]
            assert isinstance(end, Failed)
            assert end.kind is FailureKind.INTERNAL
            assert end.message == "this request crashes the workers that compute it: worker 0 exited with code 9"
        client.submit("next", PROMPT, 10)
        client.finish("next")
        assert client.token_ids("next") == alone(PROMPT, 10).token_ids


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("fatal", "worker 0 exited with code 9 (and 2 restarts after it failed)"),
        ("only once", "worker 0 was killed by SIGKILL (and 2 restarts after it failed)"),
    ],
)
def test_without_hope_the_core_ends_with_the_first_cause(tmp_path: Path, fault: str, cause: str):
    with (
        running_core(tmp_path, fault, recovery=RecoveryConfig(max_worker_restarts=2)) as core,
        SocketClient(core.address) as client,
    ):
        client.connect()
        if fault == "only once":
            os.kill(children_of(core.child.pid)[0], signal.SIGKILL)
        for name in ("a", "b", "c"):
            client.submit(name, [*PROMPT, ord(name) % 50], 50)
        dying = client.receive_until(lambda event: isinstance(event, EngineDying))
        assert dying.message == cause
        for name in ("a", "b", "c"):
            assert client.request_events(name) == [], "another core may go on with it"
        assert core.wait_for_exit() not in (0, EXIT_STARTUP_FAILED)


def test_no_restarts_at_all(tmp_path: Path):
    with (
        running_core(tmp_path, recovery=RecoveryConfig(max_worker_restarts=0)) as core,
        SocketClient(core.address) as client,
    ):
        client.connect()
        os.kill(children_of(core.child.pid)[0], signal.SIGKILL)
        assert "SIGKILL" in client.receive_until(lambda event: isinstance(event, EngineDying)).message
        assert core.wait_for_exit() != 0


def test_a_drain_outlives_the_workers(tmp_path: Path):
    with running_core(tmp_path, "slow") as core, SocketClient(core.address) as client:
        client.connect()
        asked = submit_some(client, 3)
        client.receive_until(lambda event: isinstance(event, Events))
        os.kill(core.child.pid, signal.SIGTERM)
        os.kill(children_of(core.child.pid)[0], signal.SIGKILL)
        check_undisturbed(client, asked)
        assert core.wait_for_exit() == 0


def test_a_drain_without_hope_is_a_failure(tmp_path: Path):
    with (
        running_core(tmp_path, "only once", recovery=RecoveryConfig(max_worker_restarts=1)) as core,
        SocketClient(core.address) as client,
    ):
        client.connect()
        (worker,) = children_of(core.child.pid)
        os.kill(worker, signal.SIGSTOP)
        client.submit("r", PROMPT, 50)
        wait_until(lambda: stats_of(client).num_running)
        os.kill(core.child.pid, signal.SIGTERM)
        os.kill(worker, signal.SIGKILL)
        dying = client.receive_until(lambda event: isinstance(event, EngineDying))
        assert "SIGKILL" in dying.message
        assert core.wait_for_exit() != 0


def test_a_second_sigterm_ends_a_core_without_workers(tmp_path: Path):
    with running_core(tmp_path, "stay") as core, SocketClient(core.address) as client:
        client.connect()
        os.kill(children_of(core.child.pid)[0], signal.SIGKILL)
        client.submit("r", PROMPT, 50)
        client.receive_until(lambda event: isinstance(event, StatsReport))
        send_signal(core.child.pid, signal.SIGTERM)
        core.child.terminate()
        client.finish("r")
        assert client.request_events("r")[-1].reason is FinishReason.ABORT
        assert core.wait_for_exit() == 0


def test_a_recording_with_losses_replays(tmp_path: Path):
    path = tmp_path / "steps"
    changes = {"record_steps": str(path), "recovery": RecoveryConfig(max_worker_restarts=20)}
    with running_core(tmp_path, "poison", **changes) as core, SocketClient(core.address) as client:
        client.connect()
        asked = submit_some(client, 4)
        client.submit("bad", [*PROMPT, POISON], 10)
        check_undisturbed(client, asked)
        client.finish("bad")
        os.kill(core.child.pid, signal.SIGTERM)
        assert core.wait_for_exit() == 0
    assert sum(isinstance(entry, WorkersLost) for entry in read_recording(path)) >= 3
    assert replay(read_recording(path)).is_identical


def test_a_core_that_was_itself_suspended_does_not_blame_its_workers(tmp_path: Path):
    with running_core(tmp_path, "slow") as core, SocketClient(core.address) as client:
        client.connect()
        client.submit("r", PROMPT, 40)
        client.receive_until(lambda event: isinstance(event, Events))
        workers = children_of(core.child.pid)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        os.kill(core.child.pid, signal.SIGSTOP)
        os.kill(core.child.pid, signal.SIGUSR2)
        os.kill(core.child.pid, signal.SIGCONT)
        for _ in range(2):  # it has looked at the time in between
            stats_of(client)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        client.finish("r")
        assert client.token_ids("r") == alone(PROMPT, 40).token_ids
        assert children_of(core.child.pid) == workers


def test_the_core_under_test_reports_no_losses_without_any(tmp_path: Path):
    with running_core(tmp_path) as core, SocketClient(core.address) as client:
        assert isinstance(core, CoreUnderTest)
        client.connect()
        check_undisturbed(client, submit_some(client, 4))
        stats = stats_of(client)
        assert (stats.worker_failures, stats.requests_resumed, stats.last_worker_pause_s) == ({}, 0, 0.0)
        client.send(Call(1, StartProfile(str(tmp_path))))
        reply = client.receive_until(lambda event: isinstance(event, Reply) and event.call_id == 1)
        assert reply.result == BoolResult(True)
