"""Outputs that repeat themselves: detection, and what callers see."""

import random

import pytest
from core_fakes import FakeEngine
from fake_client import MODEL, FakeClient, byte_tokenizer
from http_client import post

from octavo.core_proc.scheduler.repetition import ends_in_repetition
from octavo.frontend.generation.sequence import Sequence
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, Tokens
from octavo.protocol.params import SamplingParams, SamplingSpec
from octavo.protocol.repetition import MAX_PATTERN_SIZE, RepetitionDetectionParams, RepetitionSpec
from octavo.protocol.steps import StepResult

TWICE = RepetitionDetectionParams(max_pattern_size=2, min_count=3)


def by_definition(outputs: list[int], spec: RepetitionSpec) -> bool:
    """Whether some pattern, written `min_count` times, is what the outputs end in."""
    return any(
        len(outputs) >= size * spec.min_count and outputs[-size * spec.min_count :] == outputs[-size:] * spec.min_count
        for size in range(spec.min_pattern_size, spec.max_pattern_size + 1)
    )


def test_it_is_found_exactly_where_it_is() -> None:
    choose = random.Random(5)
    found = 0
    for _ in range(4000):
        prompt = choose.choices(range(2), k=choose.randint(1, 6))
        outputs = choose.choices(range(2), k=choose.randint(0, 12))
        if choose.random() < 0.5:
            outputs += choose.choices(range(3), k=choose.randint(1, 4)) * choose.randint(1, 4)
        shortest = choose.randint(1, 4)
        spec = RepetitionSpec(shortest, choose.randint(shortest, 6), choose.randint(2, 4))
        expected = by_definition(outputs, spec)
        assert ends_in_repetition(prompt + outputs, len(outputs), spec) == expected, (prompt, outputs, spec)
        found += expected
    assert 500 < found < 3500


def test_each_token_is_compared_a_few_times_whatever_was_written() -> None:
    num_compared = 0

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return int(self) == other

    # Nearly a repetition at hundreds of sizes, as a caller can force by a grammar.
    outputs = [Token(token) for token in [7] * 900 + [8] + [7] * 700]
    assert not ends_in_repetition([Token(1), *outputs], len(outputs), RepetitionSpec(401, 2048, 2))
    assert num_compared < 4 * len(outputs)


def test_a_sequence_ends_with_the_token_that_completes_it() -> None:
    engine = FakeEngine()
    output = engine.submit(
        "r", [1, 2, 3], 9, repetition=TWICE.spec(), resume_output_token_ids=[9, 5, 6, 5, 6, 5], stream_interval=1
    )
    engine.plan()
    result = engine._results.popleft()
    engine._results.appendleft(StepResult(result.sequence, [6], [], []))
    engine.commit()
    assert output.token_ids == [6]
    assert isinstance(output.end, Finished) and output.end.reason is FinishReason.REPETITION


@pytest.mark.parametrize(("min_tokens", "is_over"), [(6, True), (7, False)])
def test_not_before_min_tokens(min_tokens: int, is_over: bool) -> None:
    engine = FakeEngine()
    engine.submit(
        "r", [1], 9, repetition=TWICE.spec(), min_tokens=min_tokens, resume_output_token_ids=[5, 6, 5, 6, 5, 6]
    )
    assert (engine.outputs["r"].end is not None) == is_over


def test_a_core_rejects_what_would_hold_it_up() -> None:
    engine = FakeEngine()
    output = engine.submit("r", [1], repetition=RepetitionSpec(1, MAX_PATTERN_SIZE + 1, 2))
    assert isinstance(output.end, Failed)
    assert (output.end.kind, output.end.param) == (FailureKind.INVALID, "repetition_detection")


def test_the_caller_gets_the_stop_reason() -> None:
    params = SamplingParams(max_tokens=9)
    sequence = Sequence(0, byte_tokenizer(), [1], params, SamplingSpec(max_tokens=9, seed=0))
    sequence.update([Tokens("r", list(b"ababab")), Finished("r", FinishReason.REPETITION)])
    output = sequence.snapshot()
    assert (output.text, output.finish_reason, output.stop_reason) == ("ababab", "repetition", "repetition_detected")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": MAX_PATTERN_SIZE + 1, "min_count": 2},
        {"max_pattern_size": -1},
    ],
)
def test_wrong_settings_are_named(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(repetition_detection=RepetitionDetectionParams(**fields))
    assert caught.value.param == "repetition_detection"
    response = post(FakeClient(), "/v1/completions", {"model": MODEL, "prompt": "a", "repetition_detection": fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "repetition_detection")


def test_the_field_of_a_request() -> None:
    client = FakeClient()
    asked = {"max_pattern_size": 2, "min_count": 3}
    assert post(client, "/v1/completions", {"model": MODEL, "prompt": "a", "repetition_detection": asked}).is_success
    assert client.requests[0]["params"].repetition_detection == TWICE
    assert RepetitionDetectionParams().spec() is None
