"""Steps that return several tokens of a request, or none: what the core makes of them.

No scheduler plans such steps yet, so these tests change the record of a step as one that drafts tokens would.
"""

from collections.abc import Sequence

import pytest
from core_fakes import CLIENT, FakeEngine
from simulation.worker import ONE_GROUP

from octavo.core_proc import invariants
from octavo.core_proc.request import Request
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Failed, FailureKind, FinishReason, TokenLogprobs, Tokens
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import PoolingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import NO_TOKEN, Scheduled, StepResult

PROMPT = [10, 11, 12, 13, 14]
NUM_DRAFT_TOKENS = 3


class Drafting(FakeEngine):
    """Each step computes `NUM_DRAFT_TOKENS` positions after a request's last known token, and samples after all."""

    def __init__(self, groups: Sequence[CacheGroupSpec] = ONE_GROUP) -> None:
        # In large blocks: what becomes of a block that only rejected drafts needed is not decided yet.
        super().__init__(64, groups, async_scheduling=False, block_size=16)

    def draft(self, *request_ids: str) -> list[Request]:
        """Plan a step, and extend what it computes of these requests by drafts."""
        assert self.scheduler.plan() is not None
        (record,) = self.scheduler.in_flight
        requests = [self.scheduler.requests[CLIENT, request_id] for request_id in request_ids]
        for request in requests:
            index = record.requests.index(request)
            entry = record.scheduled[index]
            assert entry.num_samples == 1
            record.scheduled[index] = Scheduled(
                entry.slot, entry.start, entry.num_tokens + NUM_DRAFT_TOKENS, entry.num_samples + NUM_DRAFT_TOKENS
            )
            self.scheduler.batch.withdraw(request)
            self.scheduler.cache.extend(request, request.num_computed_tokens + NUM_DRAFT_TOKENS)
            if (states := self.scheduler.cache.states) is not None:
                states.keep_pre_draft_state(request)
            request.num_announced_blocks = request.num_blocks
            request.num_computed_tokens += NUM_DRAFT_TOKENS
            request.num_pending_tokens += NUM_DRAFT_TOKENS
            self.scheduler.batch.update(request)
        return requests

    def take(self, token_ids: list[int], counts: list[int], logprobs: list[TokenLogprobs | None] | None = None) -> None:
        """Commit this result of the step in flight."""
        sequence = self.scheduler.in_flight[0].sequence
        events = self.scheduler.commit(StepResult(sequence, pack_ids(token_ids), logprobs or [], [], counts=counts))
        self.events = [event for _, event in events]
        invariants.check(self.scheduler)


def test_several_tokens_of_a_step_are_sent_in_one_event() -> None:
    engine = Drafting()
    engine.submit("a", PROMPT, 20)
    engine.submit("b", PROMPT[1:], 20)
    a, b = engine.draft("a", "b")
    engine.take([1, 2, 3, 4, 5], [4, 1])
    assert [(event.request_id, event.token_ids) for event in engine.events] == [("a", [1, 2, 3, 4]), ("b", [5])]
    assert (a.token_ids.tolist(), a.num_uncomputed_tokens) == ([*PROMPT, 1, 2, 3, 4], 1)
    assert (b.token_ids.tolist(), b.num_uncomputed_tokens) == ([*PROMPT[1:], 5], 1), "three drafts were wrong"
    assert engine.scheduler.counters.generation_tokens == 5
    plan = engine.scheduler.plan()
    assert [(entry.start, entry.num_tokens) for entry in plan.scheduled] == [(8, 1), (4, 1)]


def test_a_state_that_holds_a_wrong_draft_is_computed_again_from_the_one_before() -> None:
    engine = Drafting([CacheGroupSpec(kind="state", window=64, num_layers=1, block_bytes=1000)])
    engine.submit("r", PROMPT, 20)
    engine.draft("r")
    engine.take([1, 2, 3, 4], [4])
    engine.draft("r")
    engine.take([5], [1])
    plan = engine.scheduler.plan()
    assert [(entry.start, entry.num_tokens, entry.num_samples) for entry in plan.scheduled] == [(8, 2, 1)]


def test_tokens_after_the_one_that_ends_a_request_are_dropped() -> None:
    engine = Drafting()
    engine.submit("stop", PROMPT, 20, stop_token_ids=(7,), logprobs=0)
    engine.submit("length", PROMPT[1:], 2)
    engine.draft("stop", "length")
    logprobs = [TokenLogprobs([token], [-1.0], 1) for token in range(8)]
    engine.take([1, 7, 3, 4, 5, 6, 7, 8], [4, 4], logprobs)
    stop, stopped, length, ended = engine.events
    assert (stop.token_ids, stop.logprobs) == ([1, 7], logprobs[:2])
    assert (stopped.reason, stopped.stop_token_id) == (FinishReason.STOP, 7)
    assert (length.token_ids, length.logprobs, ended.reason) == ([5, 6], None, FinishReason.LENGTH)
    assert not engine.scheduler.has_requests
    assert engine.scheduler.cache.pool.num_free == engine.scheduler.cache.pool.num_blocks


def test_kept_back_tokens_go_out_when_there_are_enough() -> None:
    engine = Drafting()
    engine.submit("r", PROMPT, 20, stream_interval=3)
    engine.draft("r")
    engine.take([1, 2], [2])
    assert [event.token_ids for event in engine.events] == [[1, 2]], "the first come at once"
    engine.draft("r")
    engine.take([3], [1])
    assert engine.events == []
    engine.draft("r")
    engine.take([4, 5, 6], [3])
    (tokens,) = engine.events
    assert isinstance(tokens, Tokens) and tokens.token_ids == [3, 4, 5, 6] and len(tokens.times) == 4


def test_a_request_fails_if_one_of_its_tokens_is_none() -> None:
    engine = Drafting()
    engine.submit("bad", PROMPT, 20)
    engine.submit("good", PROMPT[1:], 20)
    engine.draft("bad", "good")
    engine.take([1, NO_TOKEN, 3, 4], [2, 2])
    sent, failed, tokens = engine.events
    assert (sent.request_id, sent.token_ids) == ("bad", [1]), "what came before it is sound"
    assert isinstance(failed, Failed) and failed.kind is FailureKind.INTERNAL
    assert (tokens.request_id, tokens.token_ids) == ("good", [3, 4])


@pytest.mark.parametrize(
    ("token_ids", "counts"),
    [([1, 2, 3], [3]), ([1, 2, 3], [1, 1]), ([1], [0, 1]), ([1] * 6, [5, 1]), ([1, 2, 3], []), ([1, 2, 3], [1, 1, 1])],
)
def test_a_result_that_does_not_fit_its_step_is_rejected(token_ids: list[int], counts: list[int]) -> None:
    engine = Drafting()
    engine.submit("a", PROMPT, 20)
    engine.submit("b", PROMPT[1:], 20)
    engine.draft("a", "b")
    with pytest.raises(ProtocolError, match="samples 8 positions of 2 requests"):
        engine.take(token_ids, counts)


def test_a_pooling_request_is_rejected_with_its_field() -> None:
    engine = FakeEngine()
    ((client, failed),) = engine.scheduler.submit(CLIENT, Submit("p", pack_ids(PROMPT), PoolingSpec("embed")))
    assert client == CLIENT
    assert (failed.kind, failed.param) == (FailureKind.INVALID, "task")
    assert "'embed'" in failed.message
    assert not engine.scheduler.has_requests
