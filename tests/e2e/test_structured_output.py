"""Structured output through a whole engine: from Python and from the `openai` client."""

import asyncio
import http.client
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pytest
from json_schemas import PERSON, SCHEMAS, UNENFORCEABLE
from pydantic import BaseModel
from servers import Server, descendants, left_after, serve
from waiting import TIMEOUT_S
from workloads import fingerprint

from octavo import LLM, AsyncClient, SamplingParams, StructuredOutputsParams
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import OutputKind

BOMB = {"type": "integer", "multipleOf": 9999999}
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--cpu-kernels", "torch", "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def params(form: StructuredOutputsParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"structured_outputs": form, "max_tokens": 400, "seed": 1, **changes})


def generate(llm: LLM, form: StructuredOutputsParams, **changes: Any) -> RequestOutput:
    (output,) = llm.generate(["the fox"], params(form, **changes), use_tqdm=False)
    return output


def ids(llm: LLM, characters: str) -> list[int]:
    """The tokens of single characters."""
    return [llm.client.tokenizer.encode(character, add_special_tokens=False)[0] for character in characters]


def obeys(schema: Any, text: str) -> bool:
    # 1e999 is a JSON number, but the validator takes infinity for none.
    value = json.loads(text, parse_float=lambda number: max(-1e308, min(1e308, float(number))))
    return jsonschema_rs.is_valid(schema, value)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
def test_every_completed_output_obeys_its_schema(llm: LLM, temperature: float) -> None:
    forms = [StructuredOutputsParams(json=schema, whitespace_pattern=" ?") for schema in SCHEMAS.values()]
    # A random model likes long numbers and strings as much as their ends.
    bias = dict.fromkeys(ids(llm, '"}]'), 2.0)
    all_params = [
        params(form, temperature=temperature, seed=seed, logit_bias=bias, max_tokens=150)
        for form in forms
        for seed in range(2)
    ]
    outputs = llm.generate(["the fox"] * len(all_params), all_params, use_tqdm=False)
    num_complete = 0
    for output, one in zip(outputs, all_params, strict=True):
        if output.outputs[0].finish_reason == "stop":
            assert one.structured_outputs is not None and obeys(one.structured_outputs.json, output.outputs[0].text)
            num_complete += 1
    assert num_complete > len(all_params) / 2


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{2,5}"}, "[0-9]{3}-[a-z]{2,5}"),
        ({"choice": ["yes", "no", 'quo"ted\n', "\u00e9 \U0001f600"]}, 'yes|no|quo"ted\n|\u00e9 \U0001f600'),
        ({"grammar": 'start: "a" b "a"\nb: "b" b | "c"'}, "ab*ca"),
        ({"grammar": 'root ::= "x" [0-9] [0-9]? "y"'}, "x[0-9]{1,2}y"),
    ],
)
def test_other_forms(llm: LLM, fields: dict[str, Any], pattern: str) -> None:
    output = generate(llm, StructuredOutputsParams(**fields), n=4)
    for sequence in output.outputs:
        assert sequence.finish_reason == "stop" and sequence.stop_reason is None
        assert re.fullmatch(pattern, sequence.text)
    assert len({sequence.text for sequence in output.outputs}) > 1


def test_options_of_json(llm: LLM) -> None:
    tight = generate(llm, StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), n=3)
    for sequence in tight.outputs:
        if sequence.finish_reason == "stop":
            assert sequence.text == json.dumps(json.loads(sequence.text), separators=(",", ":"), ensure_ascii=False)
    opened = {"type": "object", "properties": {"a": {"type": "null"}}}
    closed = StructuredOutputsParams(json=opened, disable_additional_properties=True, whitespace_pattern=" ?")
    texts = {sequence.text.replace(" ", "") for sequence in generate(llm, closed, n=6).outputs}
    assert texts <= {"{}", '{"a":null}'}


def test_a_stream_gives_what_the_whole_answer_has(llm: LLM) -> None:
    async def run() -> None:
        async with AsyncClient.connect(llm.client.address) as client:
            for form in (StructuredOutputsParams(json=PERSON), StructuredOutputsParams(choice=["\U0001f600!", "no"])):
                asked = params(form, n=3, logprobs=2)
                (whole,) = [
                    output async for output in client.generate("a", asked.clone(output_kind=OutputKind.FINAL_ONLY))
                ]
                texts, counts = [""] * 3, [0] * 3
                async for output in client.generate("a", asked.clone(output_kind=OutputKind.DELTA)):
                    for sequence in output.outputs:
                        texts[sequence.index] += sequence.text
                        counts[sequence.index] += len(sequence.logprobs or [])
                assert texts == [sequence.text for sequence in whole.outputs]
                assert counts == [len(sequence.token_ids) for sequence in whole.outputs]

    asyncio.run(run())


def test_logprobs_are_those_of_the_model_and_not_of_the_mask(llm: LLM) -> None:
    free = llm.generate(["the fox"], SamplingParams(max_tokens=1, logprobs=5, seed=1), use_tqdm=False)[0]
    bound = generate(llm, StructuredOutputsParams(regex="[0-9]{4}"), logprobs=5)
    assert free.outputs[0].logprobs and bound.outputs[0].logprobs
    top = {token_id for token_id, entry in free.outputs[0].logprobs[0].items() if entry.rank <= 5}
    assert top <= bound.outputs[0].logprobs[0].keys(), "the likeliest tokens are reported, allowed or not"
    sampled = bound.outputs[0].token_ids[0]
    assert bound.outputs[0].logprobs[0][sampled].logprob < 0.0


def test_stops_and_limits_beside_a_grammar(llm: LLM) -> None:
    digits = StructuredOutputsParams(regex="[0-9]*")
    assert generate(llm, digits, ignore_eos=True, max_tokens=11).outputs[0].finish_reason == "length"
    at_least = generate(llm, digits, min_tokens=8, logit_bias={1: 100.0})
    assert len(at_least.outputs[0].token_ids) == 9, "the end is withheld, then taken at once"
    stopped = generate(llm, StructuredOutputsParams(regex="abcdef"), stop=["cd"]).outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ab", "stop", "cd")
    by_token = generate(llm, StructuredOutputsParams(regex="abc"), stop_token_ids=ids(llm, "b")).outputs[0]
    assert (by_token.text, by_token.finish_reason, by_token.stop_reason) == ("a", "stop", ids(llm, "b")[0])
    short = generate(llm, StructuredOutputsParams(choice=["no"]), min_tokens=9, ignore_eos=True).outputs[0]
    assert (short.text, short.finish_reason) == ("no", "stop"), "where nothing can follow, it ends"


def test_a_grammar_begins_after_its_mark(llm: LLM) -> None:
    output = generate(llm, StructuredOutputsParams(choice=["yes", "no"], start_after="e"), max_tokens=300).outputs[0]
    free, mark, bound = output.text.partition("e")
    assert output.finish_reason == "stop" and mark and len(free) > 0
    assert bound in ("yes", "no")


def test_tokens_that_the_request_forbids_leave_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no token satisfies both"):
        generate(llm, StructuredOutputsParams(regex="abc"), allowed_token_ids=ids(llm, "xy"))
    allowed = generate(llm, StructuredOutputsParams(regex="[a-z]{4}"), allowed_token_ids=ids(llm, "xy"))
    assert re.fullmatch("[xy]{4}", allowed.outputs[0].text)


def test_a_faulty_grammar_fails_alone(llm: LLM) -> None:
    faulty = params(StructuredOutputsParams(regex="(a"))
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["a", "b"], [faulty, params(StructuredOutputsParams(regex="abc"))], use_tqdm=False)
    assert caught.value.param == "structured_outputs.regex"
    assert generate(llm, StructuredOutputsParams(regex="abc")).outputs[0].text == "abc"


@pytest.mark.parametrize("name", UNENFORCEABLE)
def test_a_keyword_that_cannot_be_enforced_is_rejected_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        generate(llm, StructuredOutputsParams(json=UNENFORCEABLE[name]))


def test_others_are_served_while_a_grammar_compiles_for_too_long(llm: LLM) -> None:
    async def run() -> None:
        async with AsyncClient.connect(llm.client.address) as client:

            async def one(asked: SamplingParams) -> RequestOutput:
                (output,) = [output async for output in client.generate("a", asked, request_id="same")]
                return output

            plain = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
            choice = params(StructuredOutputsParams(choice=["yes", "no"]), output_kind=OutputKind.FINAL_ONLY)
            alone = [fingerprint(await one(plain)), fingerprint(await one(choice))]
            bomb = asyncio.create_task(one(params(StructuredOutputsParams(json=BOMB))))
            await asyncio.sleep(0.2)
            assert [fingerprint(await one(plain)), fingerprint(await one(choice))] == alone
            assert not bomb.done()
            # Leaving does not wait for the compiler.
            bomb.cancel()
            with pytest.raises(asyncio.CancelledError):
                await bomb

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=str)
def test_a_sandbox_does_not_outlive_its_engine(model: Path, number: signal.Signals) -> None:
    with serve(model, *FLAGS) as server:
        server.wait_until_ready()
        before = descendants(server.process.pid)
        caller = http.client.HTTPConnection(server.url.removeprefix("http://"))
        body = json.dumps({"prompt": "a", "guided_json": BOMB})
        caller.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + 20
        while len(pids := [server.process.pid, *descendants(server.process.pid)]) <= 1 + len(before):
            assert time.monotonic() < deadline, "a sandbox should be running"
            time.sleep(0.02)
        caller.close()
        server.signal(number)
        server.process.wait(TIMEOUT_S)
        assert left_after(pids) == []


class Answer(BaseModel):
    """What the client's helper makes a schema of."""

    color: Literal["red", "green"]
    sizes: list[int]
    note: str | None = None


def test_openai_client_parses_an_answer(api: openai.OpenAI) -> None:
    parsed = 0
    for seed in range(4):
        try:
            completion = api.chat.completions.parse(
                model="tiny",
                messages=[{"role": "user", "content": "Which?"}],
                response_format=Answer,
                max_tokens=400,
                seed=seed,
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(completion.choices[0].message.parsed, Answer)
        parsed += 1
    assert parsed


def test_openai_client_streams_json(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["integer range"]}},
        "seed": 3,
    }
    whole = api.chat.completions.create(**asked)
    chunks = list(api.chat.completions.create(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert obeys(SCHEMAS["integer range"], text)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"guided_choice": ["a", "b"]},
        {"guided_regex": "a|b"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}}},
    ],
)
def test_completions_take_every_name(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "n": 2, **fields})
    assert answer.status_code == 200, answer.text
    assert {choice["text"].strip('"') for choice in answer.json()["choices"]} <= {"a", "b"}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}}, "response"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_grammar": "begin: x"}, "guided_grammar"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
    ],
)
def test_a_faulty_form_is_a_bad_request(server: Server, fields: dict[str, Any], param: str, is_stream: bool) -> None:
    for path, asked in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer: httpx.Response = server.post(path, {**asked, **fields, "stream": is_stream})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(param)
