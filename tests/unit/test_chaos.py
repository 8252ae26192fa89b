"""The parts of `octavo bench chaos` without processes: random requests, assembled answers, checks."""

import asyncio
import copy
import itertools
import math
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from octavo.frontend.cli.bench.chaos import fault_injector
from octavo.frontend.cli.bench.chaos.answer_checker import AnswerChecker
from octavo.frontend.cli.bench.chaos.answers import MalformedAnswer, StreamedAnswer, pooled_answer, whole_answer
from octavo.frontend.cli.bench.chaos.callers import _params
from octavo.frontend.cli.bench.chaos.fault_injector import Action, FaultInjector, Injection, Target, plan_injections
from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, ChaosOutcome, ChaosRequest, Kind, Result
from octavo.frontend.cli.bench.chaos.processes import Process
from octavo.frontend.cli.bench.chaos.workload import (
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_CHARS,
    REQUIRED_MODEL_LEN,
    draw_jobs,
    draw_requests,
)
from octavo.frontend.http.schemas.chat import ChatCompletionRequest
from octavo.frontend.http.schemas.completions import CompletionRequest
from octavo.frontend.http.schemas.pooling import PoolingRequest
from octavo.protocol.params import OutputKind

ANSWER: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "token_ids": [5, 6],
            "tool_calls": [],
            "logprobs": {"token_logprobs": [-0.25, -1.5]},
            "finish_reason": "length",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
JOB = ChaosJob(0, ChaosRequest(0, Kind.COMPLETIONS, {"prompt": "x"}))


def test_a_seed_draws_the_same_run_again() -> None:
    requests = draw_requests(7, 300)
    assert requests == draw_requests(7, 300) != draw_requests(8, 300)
    jobs = draw_jobs(7, requests, 900)
    assert jobs == draw_jobs(7, requests, 900) != draw_jobs(8, requests, 900)
    assert set(Counter(job.request.number for job in jobs).values()) == {3}
    assert len({msgspec.json.encode(request.body) for request in requests}) == 300


def test_requests_are_what_the_api_takes_and_fit_the_engine() -> None:
    for request in draw_requests(3, 400):
        match request.kind:
            case Kind.COMPLETIONS:
                msgspec.convert(request.body, CompletionRequest, strict=False)
            case Kind.CHAT:
                msgspec.convert(request.body, ChatCompletionRequest, strict=False)
            case Kind.GENERATE:
                _params(request.body["params"], OutputKind.DELTA).verify()
        assert len(request.body.get("prompt", "")) <= MAX_PROMPT_CHARS
    assert MAX_PROMPT_CHARS + MAX_OUTPUT_TOKENS < REQUIRED_MODEL_LEN


def test_pooling_requests_are_what_the_api_takes() -> None:
    requests = draw_requests(3, 100, ("embed", "token_embed"))
    for request in requests:
        body = msgspec.convert(request.body, PoolingRequest)
        assert body.task in ("embed", "token_embed")
        assert (body.task == "embed" or len(body.input) == 1) and not request.can_stream
    assert {request.kind for request in requests} == {Kind.POOLING, Kind.POOL}
    assert max(len(request.body["input"]) for request in requests) > 8


def test_vectors_are_compared_by_their_bits() -> None:
    response = {
        "data": [{"index": 1, "data": [0.5]}, {"index": 0, "data": [[1.0, 2.0]]}],
        "usage": {"prompt_tokens": 7},
    }
    answer = whole_answer(response)
    assert answer == pooled_answer([[[1.0, 2.0]], [0.5]], 7) != pooled_answer([[[1.0, 2.0]], [0.5000001]], 7)
    checker = AnswerChecker({0: answer}, lambda time_s, within_s: False)
    assert not checker.take(JOB, Result(0, ChaosOutcome.ANSWERED, answer))
    assert checker.counts == {"equal, bit for bit": 1, "pooled texts compared": 2}


def test_requests_cover_what_a_death_could_harm() -> None:
    names = set().union(*(request.body | request.body.get("params", {}) for request in draw_requests(0, 250)))
    assert names >= {
        *("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "stop", "structured_outputs", "tools"),
        *("response_format", "seed", "request_id", "priority", "cache_salt", "repetition_penalty", "use_beam_search"),
        *("presence_penalty", "frequency_penalty", "min_tokens", "logit_bias", "bad_words"),
    }


def test_every_client_behavior_occurs_and_only_where_it_can() -> None:
    jobs = draw_jobs(1, draw_requests(1, 200), 1000)
    behaviors = [job.behavior for job in jobs]
    assert any(behavior.pause_s for behavior in behaviors)
    assert any(behavior.leaves_after for behavior in behaviors)
    assert 0.3 < sum(behavior.is_streamed for behavior in behaviors) / len(behaviors) < 0.7
    aborted = [job for job in jobs if job.behavior.aborts_after]
    assert aborted
    assert all("request_id" not in job.request.body and not job.request.is_http for job in aborted)
    assert not [job for job in jobs if job.behavior.is_streamed and not job.request.can_stream]


@pytest.mark.parametrize("num_kills", [4, 30, 31])
def test_injections_reach_every_kind_of_process_among_the_requests(num_kills: int) -> None:
    injections = plan_injections(7, 1000, num_kills, list(Target), hang_s=9.0)
    assert injections == plan_injections(7, 1000, num_kills, list(Target), hang_s=9.0)
    lasting = Counter(injection.target for injection in injections if injection.action is not Action.STOP)
    assert sum(lasting.values()) == num_kills
    assert min(lasting[target] for target in Target) >= num_kills // len(Target)
    moments = [injection.num_ended for injection in injections]
    assert moments == sorted(moments)
    assert moments[0] > 0 and moments[-1] <= 900
    assert all(injection.duration_s == 9.0 for injection in injections if injection.action is Action.HANG)
    assert all(injection.duration_s == 0.0 for injection in injections if injection.action is Action.KILL)
    for target in Target:
        numbers = [injection.number for injection in injections if injection.target is target]
        assert numbers == list(range(len(numbers))), "ranks are hit in turn"


def make_checker() -> AnswerChecker:
    return AnswerChecker({0: ANSWER}, lambda time_s, within_s: 100.0 <= time_s <= 100.0 + within_s)


def test_an_equal_answer_is_counted() -> None:
    checker = make_checker()
    assert not checker.take(JOB, Result(0, ChaosOutcome.ANSWERED, copy.deepcopy(ANSWER)))
    assert (checker.counts["equal, bit for bit"], checker.num_findings) == (1, 0)


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    answer = copy.deepcopy(ANSWER)
    place = answer
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return answer


@pytest.mark.parametrize(
    "answer",
    [
        changed(["choices", 0, "logprobs", "token_logprobs", 1], math.nextafter(-1.5, 0)),
        changed(["choices", 0, "logprobs", "token_logprobs", 1], None),
        changed(["choices", 0, "text"], "ac"),
        changed(["choices", 0, "token_ids"], [5, 7]),
        changed(["choices", 0, "finish_reason"], "stop"),
        changed(["usage", "completion_tokens"], 3),
        changed(["choices"], []),
    ],
)
def test_the_smallest_difference_is_found_and_reported(answer: dict[str, Any]) -> None:
    checker = make_checker()
    assert not checker.take(JOB, Result(0, ChaosOutcome.ANSWERED, answer))
    assert checker.num_findings == 1
    assert checker.findings[0]["got"] == answer
    assert checker.findings[0]["expected"] == ANSWER


def test_a_client_that_leaves_midway_must_have_received_a_prefix() -> None:
    checker = make_checker()
    checker.take(JOB, Result(0, ChaosOutcome.LEFT, changed(["choices", 0, "token_ids"], [5])))
    assert checker.counts["left midway, equal so far"] == 1
    checker.take(
        msgspec.structs.replace(JOB, number=1), Result(1, ChaosOutcome.LEFT, changed(["choices", 0, "token_ids"], [6]))
    )
    assert checker.num_findings == 1


def test_a_broken_connection_needs_a_kill() -> None:
    checker = make_checker()
    assert checker.take(JOB, Result(0, ChaosOutcome.BROKEN, time_s=101.0)), "it is retried"
    assert not checker.take(JOB, Result(0, ChaosOutcome.BROKEN, time_s=99.0))
    assert checker.findings[0]["what"] == "the connection broke, and no process was killed shortly before"


def test_a_client_that_notices_a_kill_before_the_injector_goes_on_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_s: list[float] = []

    def kill(victim: Process, number: object) -> bool:
        broken_s.append(time.monotonic())
        time.sleep(0.001)  # the client runs first
        return True

    monkeypatch.setattr(fault_injector, "send_signal", kill)
    victims = [Process(pid=1, start_ticks=0, module="")]
    injection = Injection(Target.HTTP, Action.KILL, num_ended=0, delay_s=0.0)
    injector = FaultInjector([injection], 0, lambda injection: victims, lambda: 1)
    asyncio.run(injector.run())
    assert injector.explains_break(broken_s[0], within_s=10)
    assert not injector.explains_break(broken_s[0] - 1, within_s=10), "it broke before"


def test_failures_and_second_answers_are_found() -> None:
    checker = make_checker()
    checker.take(JOB, Result(0, ChaosOutcome.FAILED, detail="HTTP 500"))
    checker.take(JOB, Result(0, ChaosOutcome.ANSWERED, ANSWER))
    assert [one["what"] for one in checker.findings] == ["no good answer", "answered twice"]


def chunks() -> list[dict[str, Any]]:
    def chunk(**choice: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, **choice}]}

    return [
        chunk(text="a", token_ids=[5], logprobs={"token_logprobs": [-0.25]}),
        chunk(text="b", token_ids=[6], logprobs={"token_logprobs": [-1.5]}, finish_reason="length"),
        {"choices": [], "usage": ANSWER["usage"] | {"prompt_tokens_details": {"cached_tokens": 2}}},
    ]


def put_together(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    assembled = StreamedAnswer()
    for piece in pieces:
        assembled.take(piece)
    assembled.end()
    return assembled.answer


def test_a_stream_is_the_same_answer_as_the_whole() -> None:
    whole = {
        "id": "cmpl-1",
        "created": 5,
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "token_ids": [5, 6],
                "finish_reason": "length",
                "logprobs": {"token_logprobs": [-0.25, -1.5]},
            }
        ],
        "usage": ANSWER["usage"],
    }
    assert whole_answer(whole) == put_together(chunks()) == ANSWER


def test_tool_calls_are_the_same_streamed_and_whole() -> None:
    message = {"content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}]}
    whole = whole_answer({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    deltas: list[dict[str, Any]] = [
        {"role": "assistant"},
        {"tool_calls": [{"index": 0, "id": "2", "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    ]
    pieces = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    assert put_together([*pieces, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}]) == whole


def test_a_stream_that_does_not_end_once_is_malformed() -> None:
    first, last, usage = chunks()
    for pieces in ([first], [first, last, last, usage], [first, last, usage, usage], [first, last, first], []):
        with pytest.raises(MalformedAnswer):
            put_together(pieces)
    answer = StreamedAnswer()
    for piece in (first, last):
        answer.take(piece)
    answer.end()
    for again in (answer.end, lambda: answer.take(usage)):
        with pytest.raises(MalformedAnswer):
            again()


def test_prefixes_are_shared() -> None:
    """Otherwise nothing would come from the prefix cache."""
    prompts = [request.body["prompt"] for request in draw_requests(5, 60) if "prompt" in request.body]
    pairs = itertools.combinations(prompts, 2)
    assert sum(left[:100] == right[:100] for left, right in pairs) > 20
