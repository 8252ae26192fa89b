"""What the core learns from drafts of a device whose ids come with the result of the next step."""

from types import SimpleNamespace
from typing import Any

from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.core_proc.speculation.depth import FIRST_ACCEPTANCE, Depth
from octavo.core_proc.speculation.speculation import Speculation
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import UNREAD_DRAFT, Scheduled, StepResult

UNREAD = [(0, pack_ids([UNREAD_DRAFT]))]


class Learner:
    """Speculation that verifies no draft, and two requests that have slot 0 in turn."""

    def __init__(self) -> None:
        batch: Any = SimpleNamespace(num_decoding=1, has_states=False, may_speculate_for=lambda request: True)
        self._speculation = Speculation(ResolvedSpeculation(method="eagle", max_depth=3), batch, EngineStats())
        self._speculation._row_price = lambda: 1.0
        self._requests = [
            Request(b"", Submit(name, pack_ids([1, 2]), SamplingSpec(max_tokens=100, seed=0)), 0, 0.0) for name in "ab"
        ]
        for request in self._requests:
            request.state, request.slot, request.num_pending_tokens = RequestState.RUNNING, 0, 1
        self._depths = [Depth(3), Depth(3)]
        self._speculation._depths |= dict(zip(self._requests, self._depths, strict=True))

    def observe(self, token_id: int, number: int = 0, **drafts: Any) -> float:
        """Observe a step that samples for one request; returns how often its first draft is expected to be right."""
        request = self._requests[number]
        request.token_ids.append(token_id)
        record = StepRecord(0, [request], [Scheduled(0, 1, 1, 1)], [request], [], False, 1, 1)
        self._speculation.observe(record, StepResult(0, pack_ids([token_id]), [], [], **drafts))
        return self._depths[number].first_acceptance


def test_drafts_whose_ids_come_later_are_learned_from_too() -> None:
    learner = Learner()
    learner.observe(3, drafts=UNREAD)
    assert learner.observe(4, drafts=UNREAD, earlier_drafts=[(0, pack_ids([4]))]) > FIRST_ACCEPTANCE
    assert learner.observe(5, earlier_drafts=[(0, pack_ids([4]))]) < FIRST_ACCEPTANCE
    before = learner.observe(6, drafts=UNREAD)
    assert learner.observe(7) == before, "nobody has said what it was"


def test_drafts_belong_to_those_who_had_the_slot_when_they_were_made() -> None:
    learner = Learner()
    learner.observe(3, drafts=UNREAD)
    assert learner.observe(5, 1, drafts=UNREAD, earlier_drafts=[(0, pack_ids([4]))]) == FIRST_ACCEPTANCE
    assert learner.observe(4, 0, earlier_drafts=[(0, pack_ids([6]))]) > FIRST_ACCEPTANCE
    assert learner.observe(6, 1) > FIRST_ACCEPTANCE
