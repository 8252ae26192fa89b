"""The invariant checks detect each kind of damage that they are for."""

from collections.abc import Callable

import pytest
from core_fakes import FakeEngine

from octavo.core_proc import invariants
from octavo.core_proc.cache.host_tier import HostTier
from octavo.core_proc.invariants import InvariantBroken
from octavo.core_proc.request import RequestState
from octavo.core_proc.scheduler.admission.rules import AdmissionRules, Candidate
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.waiting_queue import WaitingQueue
from octavo.protocol.steps import Scheduled


@pytest.fixture
def scheduler() -> Scheduler:
    """Two requests that share a block and a third that waits, with steps in flight."""
    engine = FakeEngine(max_num_seqs=2)
    for index in range(3):
        engine.submit(str(index), [1, 1, 1, 1, 1, index + 2], 30)
    for _ in range(6):
        engine.turn()
    assert len(engine.scheduler.waiting) == 1
    invariants.check(engine.scheduler)
    return engine.scheduler


def first(scheduler: Scheduler):
    return scheduler.running.first


def share_a_partial_block(scheduler: Scheduler) -> None:
    (mine,), (others,) = first(scheduler).block_ids, scheduler.running.last.block_ids
    scheduler.cache.pool.release(mine[-1:])
    scheduler.cache.pool.incref(others[-1])
    mine[-1] = others[-1]


DAMAGE: dict[str, Callable[[Scheduler], object]] = {
    "in no queue": lambda s: s.waiting.remove(s.waiting.first),
    "is not running": lambda s: setattr(first(s), "state", RequestState.WAITING),
    "in no queue, or in two": lambda s: s.requests.pop(next(iter(s.requests))),
    "holds something": lambda s: setattr(s.waiting.first, "slot", 1),
    "has computed tokens": lambda s: setattr(s.waiting.first, "num_computed_tokens", 1),
    "out of order": lambda s: setattr(first(s), "order", 99),
    "nothing left to compute": lambda s: setattr(first(s), "num_computed_tokens", first(s).num_tokens),
    "no plan announced": lambda s: setattr(first(s), "num_announced_blocks", 0),
    "outside its blocks": lambda s: setattr(first(s), "num_blocks", 0),
    "in one group than in another": lambda s: first(s).block_ids[0].append(7),
    "blocks of 2 groups": lambda s: first(s).block_ids.append([]),
    "than it counts": lambda s: first(s).block_ids[0].__setitem__(0, -1),
    "slots are lost": lambda s: setattr(first(s), "slot", 1),
    "miscounts its steps": lambda s: setattr(first(s), "num_in_flight", 0),
    "miscounts its placeholders": lambda s: setattr(s.waiting.first, "num_pending_tokens", 1),
    "share a slot": lambda s: s.in_flight[0].scheduled.__setitem__(0, s.in_flight[0].scheduled[1]),
    "step of": lambda s: s.in_flight[0].scheduled.__setitem__(0, Scheduled(0, 0, 33, 1)),
    "wrong reference count": lambda s: s.cache.pool.incref(first(s).block_ids[0][0]),
    "reference count": lambda s: s.cache.pool.allocate(),
    "free list is damaged": lambda s: setattr(s.cache.pool, "num_free", 1),
    "is hashed for what it does not hold": lambda s: first(s).token_ids.__setitem__(0, 9),
    "without being full and known": share_a_partial_block,
    "runs though it may not": lambda s: setattr(s._table, "allowed", frozenset()),
    "though prefix caching is off": lambda s: setattr(s.cache, "is_enabled", False),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_corrupted_state_is_detected(scheduler: Scheduler, message: str):
    DAMAGE[message](scheduler)
    with pytest.raises(InvariantBroken, match=message):
        invariants.check(scheduler)


def test_a_scheduler_that_stops_planning_is_detected(scheduler: Scheduler):
    invariants.check_plan(scheduler, None)
    idle = FakeEngine()
    idle.submit("r", [1])
    with pytest.raises(InvariantBroken, match="no step was planned"):
        invariants.check_plan(idle.scheduler, None)


def test_state_that_outlives_lost_workers_is_detected(scheduler: Scheduler):
    with pytest.raises(InvariantBroken, match="something runs without workers"):
        invariants.check_loss(scheduler)
    scheduler.lose_workers()
    invariants.check_loss(scheduler)
    pool = scheduler.cache.pool
    block_id = pool.allocate()
    pool.set_hash(block_id, b"stale")
    pool.release([block_id])
    with pytest.raises(InvariantBroken, match="contents of lost blocks"):
        invariants.check_loss(scheduler)
    pool.forget_contents()
    tier = HostTier(1)
    scheduler.cache.host_tiers.append(tier)
    invariants.check_loss(scheduler)
    place = tier.reserve()
    with pytest.raises(InvariantBroken, match="loads keep other host blocks"):
        invariants.check(scheduler)
    tier.unpin([place])
    invariants.check_loss(scheduler)
    tier.on_evicted(0, b"stale")
    with pytest.raises(InvariantBroken, match="host memory has contents or copies"):
        invariants.check_loss(scheduler)
    tier.drop(b"stale")
    with pytest.raises(InvariantBroken, match="host memory has contents or copies"):
        invariants.check_loss(scheduler)


def test_lost_workers_leave_requests_with_what_is_known(scheduler: Scheduler):
    known = {key: list(request.token_ids) for key, request in scheduler.requests.items()}
    assert any(request.num_pending_tokens for request in scheduler.requests.values())
    scheduler.lose_workers()
    assert {key: list(request.token_ids) for key, request in scheduler.requests.items()} == known
    assert all(request.num_in_flight == request.num_pending_tokens == 0 for request in scheduler.requests.values())
    plan = scheduler.plan()
    assert plan is not None
    assert plan.released == [], "the new workers know of no slot"
    assert [list(admitted.token_ids) for admitted in plan.admitted] == [
        known[request.key] for request in scheduler.running
    ]


def test_a_request_that_overtakes_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(max_num_seqs=1)
    for name in ("first", "second"):
        engine.submit(name, [1, 2], 5)
    candidate = AdmissionRules.candidate

    def overtaking(rules: AdmissionRules, queue: WaitingQueue) -> Candidate:
        head = candidate(rules, queue)
        return Candidate(queue.unpacked(next(reversed(list(queue))))) if head.request else head

    with monkeypatch.context() as patched:
        patched.setattr(AdmissionRules, "candidate", overtaking)
        plan = engine.scheduler.plan()
    with pytest.raises(InvariantBroken, match="second has started before a request that is ahead of it"):
        invariants.check_plan(engine.scheduler, plan)
