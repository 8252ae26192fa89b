"""Requests that fail in a step because they got no token, and their blocks."""

import pytest
from core_fakes import FakeEngine, alone

from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason
from octavo.protocol.steps import NO_TOKEN, StepFault, StepResult


def prompt(length: int, salt: int = 1) -> list[int]:
    """Return a prompt that differs from those of other salts in its first block."""
    return [(salt * 7 + index * index) % 49 + 1 for index in range(length)]


def reason(output) -> FinishReason:
    assert isinstance(output.end, Finished)
    return output.end.reason


def test_a_request_without_a_token_fails_alone():
    engine = FakeEngine()
    bad, good = engine.submit("bad", prompt(5), 9), engine.submit("good", prompt(7, 2), 9)
    engine.plan()
    engine.plan()
    result = engine._results.popleft()
    engine._results.appendleft(StepResult(result.sequence, [NO_TOKEN, result.token_ids[1]], [], []))
    engine.commit()
    assert isinstance(bad.end, Failed)
    assert bad.end.kind is FailureKind.INTERNAL
    assert "NaN or infinite" in bad.end.message
    engine.run()
    assert engine.scheduler.stats().corrupted_requests == 1
    assert not bad.token_ids
    assert good.token_ids == alone(prompt(7, 2), 9).token_ids


@pytest.mark.parametrize(("param", "kind"), [("extra_args", FailureKind.INVALID), (None, FailureKind.INTERNAL)])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_that_workers_find_at_fault_ends_alone(param: str | None, kind: FailureKind, is_preempted: bool):
    engine = FakeEngine()
    bad, good = engine.submit("bad", prompt(5), 9), engine.submit("good", prompt(7, 2), 9)
    engine.plan()
    engine.plan()
    if is_preempted:
        engine.scheduler.restrict(frozenset())
        engine.scheduler.restrict(None)
    slot = engine.scheduler.in_flight[0].scheduled[0].slot
    result = engine._results.popleft()
    token_ids = [NO_TOKEN, result.token_ids[1]]
    fault = StepFault(slot, "a logits processor rejects it", param)
    engine._results.appendleft(StepResult(result.sequence, token_ids, [], [], faults=[fault]))
    engine.commit()
    assert isinstance(bad.end, Failed)
    assert (bad.end.kind, bad.end.message, bad.end.param) == (kind, "a logits processor rejects it", param)
    engine.run()
    assert not bad.token_ids
    assert good.token_ids == alone(prompt(7, 2), 9).token_ids
    assert engine.scheduler.stats().corrupted_requests == 0


@pytest.mark.parametrize("is_preempted", [False, True])
def test_blocks_of_a_request_with_nan_logits_are_not_found(is_preempted: bool):
    engine = FakeEngine()
    bad = engine.submit("bad", prompt(13), 9)
    engine.plan()
    if is_preempted:
        engine.scheduler.restrict(frozenset())
    assert engine.scheduler.cache.pool.cached_blocks()
    result = engine._results.popleft()
    engine._results.appendleft(StepResult(result.sequence, [NO_TOKEN], [], []))
    engine.commit()
    assert isinstance(bad.end, Failed)
    assert not engine.scheduler.cache.pool.cached_blocks()


def test_requests_that_share_blocks_with_nan_logits_keep_them():
    engine = FakeEngine()
    engine.submit("bad", prompt(13), 9)
    engine.plan()
    sharing = engine.submit("sharing", [*prompt(13), 5], 9)
    engine.plan()
    result = engine._results.popleft()
    engine._results.appendleft(StepResult(result.sequence, [NO_TOKEN], [], []))
    engine.commit()
    later = engine.submit("later", [*prompt(13), 5], 9)
    engine.run()
    assert (sharing.num_cached_tokens, later.num_cached_tokens) == (12, 0)
    assert sharing.token_ids == later.token_ids == alone([*prompt(13), 5], 9).token_ids
