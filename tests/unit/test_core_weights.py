"""Changes of weights in the core, without workers: what is sent to them, and what follows from their answers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from core_fakes import CLIENT, FakeEngine

from octavo.core_proc.weights.control import WeightsControl
from octavo.core_proc.weights.journal import WeightsJournal, read_weights_record
from octavo.core_proc.weights.state import WeightsState
from octavo.core_proc.workers.commands import CombinedReply
from octavo.protocol.events import CallFailed, Failed
from octavo.protocol.weights import (
    HoldSteps,
    InitWeightTransfer,
    PauseGeneration,
    ResumeGeneration,
    Sleep,
    TensorShape,
    Transfer,
    TransferGroup,
    UpdateWeights,
    WakeUp,
    WeightsRecord,
    WeightsStatus,
)
from octavo.protocol.worker_commands import (
    AllocateCache,
    JoinWeightTransfer,
    LoadWeights,
    ReleaseMemory,
    RestoreWeights,
    WarmUp,
    WorkerCommand,
)


class Workers:
    """Keeps commands until they are answered."""

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[WorkerCommand] = []
        self._on_done: list[Callable[[CombinedReply], None]] = []

    @property
    def cache_plan(self):
        return type(
            "Plan", (), {"blocks_per_group": [4], "max_model_len": 64, "num_host_blocks": 0, "num_host_states": 0}
        )

    def command(self, make, on_done) -> None:
        self.sent.append(make(len(self.sent)))
        self._on_done.append(on_done)

    def answer(self, fault: str = "", digest: str = "new") -> None:
        self._on_done.pop(0)(CombinedReply(fault, bool(fault), digest))


class Front:
    """A control over a small scheduler, and what it does to frontends."""

    def __init__(self, folder: Path, record: WeightsRecord | None = None) -> None:
        self.start_digest = ""
        self.engine = FakeEngine()
        self.workers = Workers()
        self.journal = WeightsJournal(folder)
        self.folder = folder
        self.state = WeightsState(
            record or WeightsRecord(digest="old"),
            self.journal,
            lambda digest, version: f"{digest} {version}",
            read_start_digest=lambda: self.start_digest,
        )
        self.control = WeightsControl(self.engine.scheduler, self.workers, self.state)
        self.connected = {CLIENT}
        self.is_open, self.events, self.announced, self.replies = True, [], [], []
        self.control.serve(self)

    @property
    def has_forwarded(self) -> bool:
        return self.engine.scheduler.has_requests

    def is_connected(self, client: bytes) -> bool:
        return client in self.connected

    def abort_all(self) -> None:
        self.engine.abort(*[key[1] for key in list(self.engine.scheduler.requests)])

    def hold(self, *, is_open: bool) -> None:
        self.is_open = is_open

    def deliver(self, events) -> None:
        self.events += events

    def announce(self, changed) -> None:
        self.announced.append(changed)

    def call(self, call) -> None:
        self.control.call(CLIENT, call, self.replies.append)
        self.control.advance()

    def answer(self, fault: str = "", digest: str = "new") -> None:
        self.workers.answer(fault, digest)
        self.control.advance()

    @property
    def status(self) -> WeightsStatus:
        return self.state.status


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(tmp_path)


UPDATE = UpdateWeights("1", "/new", "label")


def test_an_update_checks_then_loads_then_tells(front: Front):
    front.call(UPDATE)
    assert not front.control.may_plan
    assert front.workers.sent == [LoadWeights(0, "/new", is_check=True)]
    front.answer()
    assert front.workers.sent[1:] == [LoadWeights(1, "/new")]
    front.answer()
    assert front.control.may_plan
    assert front.replies == [WeightsStatus(1, "label")]
    (changed,) = front.announced
    assert (changed.identity, changed.weights_digest, changed.weight_version) == ("new 1", "new", 1)
    assert read_weights_record(front.folder).sources[0].path == "/new"
    front.call(UPDATE)  # a client repeats it, as it has had no answer
    assert front.replies[1].version == 1 and len(front.workers.sent) == 2


def test_a_checkpoint_that_is_refused_changes_nothing(front: Front):
    front.call(UPDATE)
    front.answer("it lacks a tensor")
    assert isinstance(front.replies[0], CallFailed) and "still has version 0" in front.replies[0].message
    assert front.control.may_plan and front.status.version == 0 and not front.announced


def test_an_update_that_fails_in_the_middle_ends_requests_until_all_weights_are_there(front: Front):
    front.engine.submit("r", [1, 2, 3])
    front.call(UPDATE)
    front.answer()
    front.answer("the file is damaged")
    assert "must be updated again" in front.replies[0].message
    (failed,) = [event for client, event in front.events if client == CLIENT]
    assert isinstance(failed, Failed) and not front.control.may_plan
    assert "damaged" in front.control.refusal
    front.call(UpdateWeights("2", "/part", is_partial=True))
    assert "a partial update needs all other weights" in front.replies[1].message
    front.call(UpdateWeights("3", "/whole"))
    front.answer()
    front.answer()
    assert front.control.may_plan and not front.control.refusal and front.status.version == 1


def test_workers_that_die_in_an_update_come_back_with_the_version_before(front: Front):
    front.call(UpdateWeights("0", "/first"))
    front.answer()
    front.answer()
    front.call(UPDATE)
    front.answer()
    front.workers.is_ready = False
    front.answer("worker 0 has died")
    assert "come back with version 1" in front.replies[1].message and not front.control.refusal
    front.workers.is_ready = True
    front.control.on_replaced()
    assert not front.control.may_plan
    front.control.advance()
    assert front.workers.sent[-1] == LoadWeights(4, "/first")
    front.answer()
    assert front.control.may_plan


def test_a_successor_repeats_full_and_partial_updates_in_order(front: Front, tmp_path: Path):
    for number, (path, is_partial) in enumerate([("/a", False), ("/b", True), ("/c", False), ("/d", True)]):
        front.call(UpdateWeights(str(number), path, is_partial=is_partial))
        front.answer()
        front.answer()
    record = read_weights_record(front.folder)
    (tmp_path / "next").mkdir()
    successor = Front(tmp_path / "next", record)
    successor.control.advance()
    successor.answer()
    successor.answer()
    assert successor.workers.sent == [LoadWeights(0, "/c"), LoadWeights(1, "/d", is_partial=True)]
    assert successor.control.may_plan and successor.engine.scheduler.weight_version == 4
    assert read_weights_record(tmp_path / "next") == record


def test_a_trainers_weights_are_lost_with_the_workers(front: Front):
    group = TransferGroup("10.0.0.1", 29500, 1, 2)
    front.call(InitWeightTransfer(group))
    assert front.workers.sent == [JoinWeightTransfer(0, group)] and not front.control.may_plan
    front.answer("nobody is there")
    assert "nobody is there" in front.replies[0].message and front.control.may_plan
    digests = []
    for name in ("a", "b"):
        transfer = Transfer(name, [TensorShape("x", "float32", [1])])
        front.call(UpdateWeights(name, "", transfer=transfer))
        front.answer()
        assert front.workers.sent[-1].transfer == transfer
        front.answer(digest="")
        digests.append(front.announced[-1].weights_digest)
    assert len(set(digests)) == 2 and all(digests)
    front.control.on_replaced()
    front.control.advance()
    assert "lost with the workers" in front.control.refusal


def test_steps_are_held_as_long_as_who_asked_is_there(front: Front):
    front.call(PauseGeneration("keep"))
    front.call(HoldSteps())
    front.call(ResumeGeneration())
    assert not front.status.is_paused and not front.control.may_plan, "a pause is another matter"
    front.call(HoldSteps(is_held=False))
    assert front.control.may_plan
    front.call(HoldSteps())
    front.control.on_lost(b"another")
    assert not front.control.may_plan and front.control.is_held
    front.connected.clear()
    front.control.on_lost(CLIENT)
    assert front.control.may_plan
    front.call(HoldSteps())  # had waited for another job, and comes too late
    assert front.control.may_plan


def test_a_check_changes_nothing(front: Front):
    for fault in ("", "it lacks a tensor"):
        front.call(UpdateWeights("1", "/new", is_check=True))
        front.answer(fault)
        assert front.control.may_plan and front.status.version == 0
    assert [command.is_check for command in front.workers.sent] == [True, True]
    assert isinstance(front.replies[0], WeightsStatus) and isinstance(front.replies[1], CallFailed)


@pytest.mark.parametrize(
    ("fault", "digest", "reason"),
    [("no checkpoint in /new", "new", "no checkpoint in /new"), ("", "other", "/new has changed since it was loaded")],
)
def test_weights_that_cannot_be_loaded_again_are_not_replaced_by_others(front: Front, fault, digest, reason):
    front.call(UPDATE)
    front.answer()
    front.answer()
    front.control.on_replaced()
    front.control.advance()
    front.answer(fault, digest)
    assert reason in front.control.refusal
    assert "cannot be loaded again" in front.control.refusal and not front.control.may_plan


def test_workers_that_have_read_changed_files_are_refused_until_all_weights_are_updated(front: Front):
    front.engine.submit("r", [1, 2, 3])
    front.start_digest = "changed"
    front.control.on_replaced()
    front.control.advance()
    assert "have changed since the engine was started" in front.control.refusal and not front.control.may_plan
    assert [type(event) for _, event in front.events] == [Failed]
    front.call(UPDATE)
    front.answer()
    front.answer()
    assert front.control.may_plan and not front.control.refusal
    front.control.on_replaced()
    front.control.advance()
    front.answer()
    assert front.control.may_plan and not front.control.refusal, "the update replaces what the workers have read"


def test_workers_without_their_weights_sleep_as_their_predecessors_did(front: Front):
    front.call(Sleep(1, "keep"))
    front.answer()
    front.start_digest = "changed"
    front.control.on_replaced()
    front.control.advance()
    assert "have changed since the engine was started" in front.control.refusal
    assert front.workers.sent[1:] == [ReleaseMemory(1, 1)], "wake_up allocates the cache again"
    front.answer()
    front.call(WakeUp(["weights", "kv_cache"]))
    for _ in range(3):
        front.answer()
    front.call(UPDATE)
    front.answer()
    front.answer()
    assert front.control.may_plan and not front.control.refusal


def test_weights_that_were_dropped_cannot_be_lost(front: Front):
    front.call(UpdateWeights("1", "", transfer=Transfer("a", [TensorShape("x", "float32", [1])])))
    front.answer()
    front.answer(digest="")
    front.call(Sleep(2, "keep"))
    front.answer()
    front.control.on_replaced()
    front.control.advance()
    assert not front.control.refusal, "requests wait for the update that follows"
    assert front.workers.sent[3:] == [ReleaseMemory(3, 2)]


def test_a_pause_waits_for_what_it_says(front: Front):
    front.engine.submit("r", [1, 2, 3], max_tokens=2)
    front.call(PauseGeneration("wait"))
    assert front.control.may_plan and not front.is_open and not front.replies
    front.engine.run()
    front.control.advance()
    assert front.replies[0].is_paused, "all requests have ended"
    front.call(ResumeGeneration())
    assert front.is_open and not front.status.is_paused
    front.call(PauseGeneration("keep"))
    assert front.is_open and not front.control.may_plan


def test_sleep_and_wake_up(front: Front):
    front.call(Sleep(2, "keep"))
    assert front.workers.sent == [ReleaseMemory(0, 2)]
    front.answer()
    assert front.status.asleep == ["weights", "kv_cache"] and not front.control.refusal
    front.call(UPDATE)
    assert "wake them up" in front.replies[1].message
    front.call(WakeUp(["kv_cache", "weights"]))
    for _ in range(3):
        front.answer()
    assert front.workers.sent[1:] == [RestoreWeights(1), AllocateCache(2, [4], 64), WarmUp(3)]
    assert not front.status.asleep and not front.status.is_paused
    assert "update all of them" in front.status.fault and not front.control.may_plan, "there are no weights yet"
    front.call(UPDATE)
    front.answer()
    front.answer()
    assert front.control.may_plan
    front.call(Sleep(3))
    assert isinstance(front.replies[-1], CallFailed)
    front.call(WakeUp(["all"]))
    assert "nothing is called 'all'" in front.replies[-1].message
