"""The search for requests that crash processes: the guilty ones are found, and the others finish."""

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from octavo.protocol.crash_bisection import CrashBisection
from octavo.protocol.restarts import FIRST_DELAY_S, MAX_DELAY_S, RestartPolicy


@dataclass
class Job:
    """A request of `length` tokens that kills whenever the token at `poison` is computed."""

    length: int
    poison: int | None = None
    num_done: int = 0
    passes_at: int = 0


@dataclass
class World:
    """A process that computes a token of each running job in every step, `depth` steps at a time, and may die of it."""

    jobs: list[Job]
    width: int
    depth: int
    suspects: CrashBisection[int] = field(default_factory=CrashBisection)
    finished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    num_deaths: int = 0
    accidents: set[int] = field(default_factory=set)
    """Turns in which somebody kills the process, whatever it computes."""

    def run(self) -> None:
        turn = 0
        while len(self.finished) + len(self.failed) < len(self.jobs):
            turn += 1
            assert turn < 10_000, "no end"
            allowed = self.suspects.allowed
            live = [key for key in range(len(self.jobs)) if key not in self.finished | self.failed]
            batch = [key for key in live if allowed is None or key in allowed][: self.width]
            assert batch, "somebody is allowed to run"
            self._die(batch) if turn in self.accidents or self._is_fatal(batch) else self._advance(batch)

    def _is_fatal(self, batch: list[int]) -> bool:
        return any(
            job.poison is not None and job.num_done <= job.poison < job.num_done + self.depth
            for job in map(self.jobs.__getitem__, batch)
        )

    def _die(self, batch: list[int]) -> None:
        self.num_deaths += 1
        for key in batch:
            self.jobs[key].passes_at = self.jobs[key].num_done + self.depth
        if (guilty := self.suspects.record_crash(batch)) is not None:
            assert guilty not in self.failed
            self.failed.add(guilty)

    def _advance(self, batch: list[int]) -> None:
        for key in batch:
            job = self.jobs[key]
            job.num_done += 1
            if job.num_done >= job.length:
                self.finished.add(key)
            if key in self.finished or job.num_done >= job.passes_at:
                self.suspects.clear([key])


jobs = st.builds(Job, st.integers(1, 8), st.none() | st.none() | st.integers(0, 9))


@given(st.lists(jobs, min_size=1, max_size=24), st.integers(1, 24), st.integers(1, 2))
def test_the_guilty_fail_and_all_others_finish(jobs: list[Job], width: int, depth: int):
    world = World(jobs, width, depth)
    world.run()
    # With two steps in flight a job also dies of the token after the one that it wants last: as a worker would not.
    guilty = {key for key, job in enumerate(jobs) if job.poison is not None and job.poison < job.length + depth - 1}
    assert world.failed == guilty
    assert world.finished == set(range(len(jobs))) - guilty
    assert not world.suspects
    assert world.suspects.allowed is None
    assert world.num_deaths <= len(guilty) * (4 + math.ceil(math.log2(max(2, min(width, len(jobs))))))


@given(st.lists(jobs, min_size=1, max_size=12), st.integers(1, 12), st.sets(st.integers(1, 60), max_size=8))
def test_the_search_ends_in_spite_of_unrelated_crashes(jobs: list[Job], width: int, accidents: set[int]):
    world = World(jobs, width, 2, accidents=accidents)
    world.run()
    guilty = {key for key, job in enumerate(jobs) if job.poison is not None and job.poison < job.length + 1}
    assert world.failed >= guilty


def test_a_single_crash_isolates_no_request():
    suspects: CrashBisection[str] = CrashBisection()
    assert suspects.record_crash(["a", "b"]) is None
    assert suspects.allowed is None
    suspects.clear(["a", "b"])
    assert suspects.record_crash(["a", "b"]) is None
    assert suspects.allowed is None, "both got past the place of the first death"


def test_a_request_alone_is_tried_twice_more():
    suspects: CrashBisection[str] = CrashBisection()
    assert [suspects.record_crash(["a"]) for _ in range(3)] == [None, None, "a"]
    assert not suspects
    assert suspects.allowed is None


def test_trials_run_the_halves_apart_and_the_less_suspicious_first():
    suspects: CrashBisection[str] = CrashBisection()
    suspects.record_crash(["a", "b", "c", "d"])
    suspects.record_crash(["a", "b", "c", "d", "new"])
    assert suspects.allowed == {"new"}
    suspects.clear(["new"])
    assert suspects.allowed == {"a", "b"}
    suspects.record_crash(["a", "b"])
    assert suspects.allowed == {"c", "d"}
    suspects.clear(["c", "d"])
    assert suspects.allowed == {"a"}
    suspects.clear(["a"])
    assert suspects.allowed == {"b"}
    assert suspects.record_crash(["b"]) is None
    assert suspects.allowed == {"b"}, "at once, on a process that has computed nothing else"
    assert suspects.record_crash(["b"]) == "b"
    assert suspects.allowed is None


def test_a_death_without_anything_in_flight_blames_nobody():
    suspects: CrashBisection[str] = CrashBisection()
    assert suspects.record_crash([]) is None
    assert not suspects
    suspects.record_crash(["a", "b"])
    suspects.record_crash(["a", "b"])
    suspects.record_crash([])
    assert suspects.allowed == {"a"}


def test_steps_of_others_at_the_beginning_of_a_trial_settle_nothing():
    suspects: CrashBisection[str] = CrashBisection()
    suspects.record_crash(["a", "b"])
    suspects.record_crash(["a", "b"])
    suspects.record_crash(["a", "stranger"])
    assert suspects.allowed == {"a"}
    suspects.clear(["a"])
    assert suspects.allowed == {"b"}
    suspects.clear(["b"])
    assert suspects.allowed == {"stranger"}


def test_restarts_wait_longer_and_longer_and_then_no_more():
    policy = RestartPolicy(max_restarts=8)
    verdicts = [policy.fail(f"cause {number}") for number in range(9)]
    delays = [verdict.delay_s for verdict in verdicts]
    assert delays[:3] == [0.0, FIRST_DELAY_S, 2 * FIRST_DELAY_S]
    assert max(delays) <= MAX_DELAY_S
    assert [verdict.is_hopeless for verdict in verdicts] == [False] * 8 + [True]
    assert policy.root_cause == "cause 0 (and 8 restarts after it failed)"


def test_progress_makes_the_next_failure_a_first_one():
    policy = RestartPolicy(max_restarts=2)
    policy.fail("old")
    policy.fail("older")
    policy.progress()
    assert policy.fail("new").delay_s == 0.0
    assert policy.root_cause == "new"
