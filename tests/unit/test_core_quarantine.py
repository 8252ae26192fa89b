"""Quarantine, and the journal that a core leaves to the next: which requests wait, run or fail."""

from pathlib import Path

import pytest
from core_fakes import CLIENT, cache_plan, core_config
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.crash_journal import SimulatedCrashJournal
from simulation.run import run_scenario
from simulation.scenario import CORE_POISON_MARK, INTAKE_POISON_MARK, POISON_MARKS, Ask, Scenario

from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.crash_journal import MIN_SLOTS, CrashJournal, CrashRecord, read_crash_record
from octavo.core_proc.recovery.quarantine import Quarantine
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.events import Failed, FailureKind, Finished, Tokens
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.pulse import PulseReader, PulseWriter
from octavo.protocol.requests import Submit
from octavo.protocol.restarts import MAX_RESTARTS
from octavo.protocol.steps import StepResult


def submission(name: str, *, is_continued: bool = True) -> Submit:
    return Submit(name, pack_ids([1, 2, 3]), SamplingSpec(max_tokens=4, seed=0), is_continued=is_continued)


class Life:
    """A core without steps, that has inherited what the one before left."""

    def __init__(self, predecessor: "Life | None" = None, max_num_quarantined: int = 0) -> None:
        config = core_config()
        self.scheduler = Scheduler(config, cache_plan(config), lambda: 0.0)
        self.journal = SimulatedCrashJournal()
        self.attribution = CrashAttribution(self.scheduler, self.journal)
        if predecessor is not None:
            self.attribution.record_core_crash(*predecessor.journal.read(), "killed")
        is_live = self.scheduler.requests.__contains__
        self.quarantine = Quarantine(self.attribution, self.scheduler.submit, is_live, max_num_quarantined)
        self.quarantine.connect(CLIENT, b"always the same")

    def submit(self, *names: str, is_continued: bool = True) -> list[ClientEvent]:
        events = [
            event
            for name in names
            for event in self.quarantine.submit(CLIENT, submission(name, is_continued=is_continued))
        ]
        self.quarantine.observe(events)
        return events

    def turn(self) -> None:
        self.attribution.update()
        self.quarantine.observe(self.quarantine.release_ready())

    @property
    def admitted(self) -> set[str]:
        return {request_id for _, request_id in self.scheduler.requests}


def after_two_deaths(*names: str, max_num_quarantined: int = 0) -> Life:
    life = Life()
    life.submit(*names, is_continued=False)
    life = Life(life)
    life.submit(*names)
    return Life(life, max_num_quarantined)


def test_after_one_crash_all_requests_are_admitted() -> None:
    first = Life()
    first.submit("a", "b", is_continued=False)
    second = Life(first)
    second.submit("a", "b")
    assert second.admitted == {"a", "b"}
    assert not second.attribution.is_isolating


def test_while_suspects_run_isolated_no_other_request_is_admitted() -> None:
    life = after_two_deaths("a", "b", "c", "d")
    life.submit("a", "b", "c", "d", "new")
    assert life.admitted == {"new"}, "whom nobody suspects comes in until a suspect is there"
    life.turn()
    assert life.admitted == {"new", "a", "b"}
    assert life.journal.is_isolating
    assert {request_id for _, request_id in life.scheduler.allowed} == {"a", "b"}
    assert len(life.journal.in_flight) == 2, "nobody else can be what kills it now"
    life.submit("late", is_continued=False)
    assert "late" not in life.admitted
    life.quarantine.observe(life.scheduler.abort(CLIENT, ["a", "b"]))
    life.turn()
    assert life.admitted == {"new", "c", "d"}
    life.quarantine.observe(life.scheduler.abort(CLIENT, ["c", "d"]))
    life.turn()
    assert life.admitted == {"new", "late"}
    assert life.scheduler.allowed is None
    assert not life.journal.is_isolating
    assert len(life.journal.in_flight) == 2


def test_a_request_that_crashes_the_core_alone_fails_in_every_later_core() -> None:
    life = after_two_deaths("a")
    for _ in range(2):
        events = life.submit("a")
        life.turn()
        life = Life(life)
    del events
    for _ in range(2):  # that it has failed may not have arrived
        ((_, end),) = life.submit("a")
        assert isinstance(end, Failed) and end.kind is FailureKind.INTERNAL and "killed" in end.message
        life = Life(life)
    assert not life.submit("a", is_continued=False), "it is another request of that name"


def test_suspects_wait_until_no_step_computes_other_requests() -> None:
    life = after_two_deaths("a", "b")
    life.submit("new", is_continued=False)
    plan = life.scheduler.plan()
    assert plan is not None
    life.submit("a", "b")
    for _ in range(3):
        life.turn()
        assert life.scheduler.plan() is None, "the step in flight computes a request that is no suspect"
    assert life.admitted == {"new"} and len(life.journal.in_flight) == 1
    life.scheduler.commit(StepResult(plan.sequence, pack_ids([7]), [], []))
    life.turn()
    assert life.admitted == {"new", "a"}
    assert [request_id for _, request_id in life.scheduler.allowed] == ["a"]
    assert len(life.journal.in_flight) == 1
    assert life.scheduler.plan() is not None


def test_a_suspect_goes_on_when_another_of_its_group_ends() -> None:
    life = after_two_deaths("a", "b", "c", "d")
    life.submit("a", "b", "c", "d")
    life.turn()
    plan = life.scheduler.plan()
    assert plan is not None and len(plan.admitted) == 2
    life.quarantine.observe(life.scheduler.abort(CLIENT, ["a"]))
    life.turn()
    assert [(request.request_id, request.num_preemptions) for request in life.scheduler.running] == [("b", 0)]
    assert life.scheduler.plan() is not None
    assert len(life.journal.in_flight) == 1


def test_suspects_that_are_not_resubmitted_delay_no_request() -> None:
    life = after_two_deaths("a", "b")
    life.submit("new", is_continued=False)
    life.turn()
    assert life.admitted == {"new"}
    assert life.scheduler.allowed is None


def test_only_so_many_new_requests_are_quarantined() -> None:
    life = after_two_deaths("a", "b", max_num_quarantined=2)
    life.submit("a", "b")
    life.turn()
    assert life.admitted == {"a"}
    assert not life.submit("c", is_continued=False)
    ((_, end),) = life.submit("d", is_continued=False)
    assert isinstance(end, Failed)
    assert (end.kind, end.param) == (FailureKind.OVERLOADED, "max_num_queued_reqs")
    assert not life.submit("e"), "what was accepted before is never rejected"


def test_the_end_of_a_quarantine_is_spread_over_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.core_proc.recovery.quarantine.MAX_RELEASED_AT_ONCE", 2)
    life = after_two_deaths("a")
    life.submit("a")
    life.turn()
    life.submit(*"bcdef", is_continued=False)
    life.quarantine.observe(life.scheduler.abort(CLIENT, ["a"]))
    num_held = []
    while life.quarantine.num_held:
        life.turn()
        num_held.append(life.quarantine.num_held)
        assert life.quarantine.has_ready == (num_held[-1] > 0)
    assert num_held == [3, 1, 0]
    assert life.admitted == set("bcdef")


def test_held_requests_can_be_aborted_and_keep_their_ids_in_use() -> None:
    life = after_two_deaths("a", "b")
    life.submit("a", "b")
    life.turn()
    for name in ("a", "b"):
        ((_, end),) = life.submit(name)
        assert isinstance(end, Failed) and end.param == "request_id"
    assert life.quarantine.num_held == 1 and life.quarantine.is_live((CLIENT, "b"))
    assert (CLIENT, "a") in life.attribution.tracked, "the rejection of another of its name is not its end"
    ((_, end),) = life.quarantine.abort(CLIENT, ["a", "b"])
    assert isinstance(end, Finished) and end.request_id == "b"
    assert not life.quarantine.num_held


def test_two_connections_of_a_frontend_have_each_submitted_a_request() -> None:
    """The loss of the first connection may be noticed after the frontend has reconnected."""
    life = Life()
    life.quarantine.connect(b"again", b"always the same")
    life.submit("a", is_continued=False)
    assert not life.quarantine.submit(b"again", submission("a"))
    assert len(life.journal.in_flight) == 1
    for client in (CLIENT, b"again"):
        assert life.quarantine.requests_of(client) == ["a"]
        assert len(life.journal.in_flight) == 1
        life.quarantine.observe(life.scheduler.abort(client, ["a"]))
        assert life.quarantine.requests_of(client) == []
    assert life.journal.in_flight == []


def test_a_token_is_progress() -> None:
    life = Life()
    life.submit("a", is_continued=False)
    assert not life.journal.has_progressed
    life.quarantine.observe([(CLIENT, Tokens("a", [7]))])
    assert life.journal.has_progressed


def test_the_crash_journal_outlives_its_writer(tmp_path: Path) -> None:
    assert read_crash_record(tmp_path) is None
    pulse = PulseWriter(tmp_path / "pulse")
    journal = CrashJournal(tmp_path, pulse)
    names = [number.to_bytes(16, "big") for number in range(1, 3 * MIN_SLOTS)]
    slots = [journal.add(name) for name in names]
    assert [journal.name(slot) for slot in slots] == names
    journal.add(names[0])  # of another connection of the same frontend
    journal.remove(slots[1])
    left = read_crash_record(tmp_path)
    assert left is not None
    assert left[0] == CrashRecord()
    assert sorted(left[1]) == sorted({*names} - {names[1]})
    for slot in slots:
        journal.mark_in_flight(slot, is_in_flight=slot in (slots[4], slots[5]))
    journal.remove(slots[4])
    assert journal.add(names[1]) == slots[4], "slots are used again"
    record = CrashRecord(culprits={names[5]: "why"})
    record.suspicion.deaths[names[1]] = 2
    journal.save(record)
    journal.note_progress()
    journal.note_isolation(is_isolating=True)
    left = read_crash_record(tmp_path)
    assert left is not None
    assert left[0] == record
    assert sorted(left[1]) == [names[0], names[1], names[5]]
    reader = PulseReader(tmp_path / "pulse")
    told = reader.read()
    assert told.has_progressed and told.is_isolating
    reader.close()
    journal.close()
    pulse.close()


@settings(max_examples=examples(20, 40))
@given(
    asks=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 0.2), st.sampled_from(["", "", "", *POISON_MARKS])),
        min_size=1,
        max_size=16,
    ),
    depth=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_only_guilty_requests_fail_and_all_others_finish(
    asks: list[tuple[int, float, str]], depth: bool, seed: int
) -> None:
    """Whoever asks for them: what kills workers, what kills cores at a step, and what kills them at once."""
    scenario = Scenario(
        seed,
        engine={"max_num_seqs": 4, "max_model_len": 40, "block_size": 4, "async_scheduling": depth},
        num_blocks=100,
        num_frontends=4,
        delay_scale=0.005,
        step_scale=0.01,
        queue_limit=1024,
        max_backlog_events=16384,
        asks=[
            Ask(frontend, time, Submit(f"{number}{mark}", pack_ids([1, 2, number]), SamplingSpec(max_tokens=6, seed=0)))
            for number, (frontend, time, mark) in enumerate(asks)
        ],
    )
    report = run_scenario(scenario, is_observed=True)
    marks = [mark for _, _, mark in asks if mark]
    assert report.num_guilty == len(marks)
    assert report.num_blamed == 0
    assert report.num_answers == len(asks) - len(marks)
    num_lethal = sum(mark in (CORE_POISON_MARK, INTAKE_POISON_MARK) for mark in marks)
    # Most scenarios take 3 lives for each of them, one in a thousand as many as 17: frontends come back in any order.
    # A core whose workers crash too often without progress gives up; the next one continues the search.
    num_given_up = report.num_worker_lives // (MAX_RESTARTS + 1)
    assert report.num_core_lives <= 1 + 32 * num_lethal + num_given_up


@pytest.mark.parametrize("num_frontends", [1, 7])
def test_a_search_takes_few_restarts(num_frontends: int) -> None:
    asks = [
        Ask(
            number % num_frontends,
            0.0,
            Submit(f"{number}{'?' * (number == 70)}", pack_ids([1, number % 50]), SamplingSpec(4, seed=0)),
        )
        for number in range(100)
    ]
    engine = {"max_num_seqs": 32, "max_model_len": 40, "block_size": 4}
    scenario = Scenario(3, engine, 400, num_frontends, 0.005, 0.01, 1024, 16384, asks)
    report = run_scenario(scenario, is_observed=False)
    assert (report.num_guilty, report.num_answers) == (1, 99)
    assert report.num_core_lives <= 16
