"""Requests that the scheduler rejects at once: too long, queue full, id in use."""

import pytest
from core_fakes import FakeEngine

from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason


def prompt(length: int, salt: int = 1) -> list[int]:
    """Return a prompt that differs from those of other salts in its first block."""
    return [(salt * 7 + index * index) % 49 + 1 for index in range(length)]


def reason(output) -> FinishReason:
    assert isinstance(output.end, Finished)
    return output.end.reason


def test_a_request_that_can_never_fit_fails_at_once():
    engine = FakeEngine(num_blocks=4, max_model_len=64)
    long = engine.submit("long", prompt(64), max_tokens=1)
    wide = engine.submit("wide", prompt(10), max_tokens=20)
    empty = engine.submit("empty", [], max_tokens=1)
    alien = engine.submit("alien", [1, 50], max_tokens=1)
    fits = engine.submit("fits", prompt(10), max_tokens=7)
    assert [(o.end.kind, o.end.param) for o in (long, wide, empty, alien)] == [
        (FailureKind.INVALID, "prompt"),
        (FailureKind.INVALID, "max_tokens"),
        (FailureKind.INVALID, "prompt"),
        (FailureKind.INVALID, "prompt"),
    ]
    engine.run()
    assert len(fits.token_ids) == 7


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("seed", {"seed": -1}),
        ("temperature", {"temperature": float("nan")}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": 1.5}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("presence_penalty", {"presence_penalty": float("inf")}),
        ("logprobs", {"logprobs": 51}),
        ("prompt_logprobs", {"prompt_logprobs": -1, "skip_reading_prefix_cache": True}),
        ("skip_reading_prefix_cache", {"prompt_logprobs": 1}),
        ("logit_bias", {"logit_bias": ((50, 1.0),)}),
        ("stop_token_ids", {"stop_token_ids": (1, 50)}),
        ("allowed_token_ids", {"allowed_token_ids": (50,)}),
        ("logprob_token_ids", {"logprob_token_ids": (50,)}),
        ("bad_words", {"bad_words": ((1, 50),)}),
        ("bad_words", {"bad_words": ((),)}),
        ("resume_output_token_ids", {"resume_output_token_ids": [-1]}),
    ],
)
def test_values_that_would_crash_a_worker_are_rejected(param, fields):
    output = FakeEngine().submit("r", prompt(4), **fields)
    assert (output.end.kind, output.end.param) == (FailureKind.INVALID, param)


def test_a_full_queue_rejects_with_overloaded():
    engine = FakeEngine(max_num_queued_reqs=1)
    engine.submit("first", prompt(4))
    second = engine.submit("second", prompt(4))
    assert isinstance(second.end, Failed)
    assert (second.end.kind, second.end.param) == (FailureKind.OVERLOADED, "max_num_queued_reqs")
    further = engine.submit("further", prompt(4), is_continued=True)
    assert further.end is None, "what is accepted is not rejected midway"
    engine.plan()
    third = engine.submit("third", prompt(4))
    engine.run()
    assert reason(further) is FinishReason.LENGTH
    assert reason(third) is FinishReason.LENGTH


def test_too_many_queued_tokens_are_rejected_unless_nothing_else_waits():
    engine = FakeEngine(max_num_queued_tokens=10, max_num_seqs=1)
    running = engine.submit("long", prompt(12))
    second = engine.submit("second", prompt(1, 1))
    expected = (FailureKind.OVERLOADED, "max_num_queued_tokens")
    assert (second.end.kind, second.end.param) == expected, "the long one still waits"
    engine.plan()
    engine.submit("third", prompt(6, 2))
    fourth = engine.submit("fourth", prompt(5, 3))
    assert "--max-num-queued-tokens" in fourth.end.message
    fifth = engine.submit("fifth", prompt(4, 4))
    engine.run()
    assert reason(running) is reason(fifth) is FinishReason.LENGTH
    assert engine.scheduler.waiting.num_prompt_tokens == engine.scheduler.running.num_prompt_tokens == 0


def test_a_request_id_in_use_is_rejected_and_the_first_goes_on():
    engine = FakeEngine()
    engine.submit("same", prompt(4))
    first = engine.outputs["same"]
    second = engine.submit("same", prompt(4))
    assert second.end.param == "request_id"
    engine.outputs["same"] = first
    engine.run()
    assert reason(first) is FinishReason.LENGTH
