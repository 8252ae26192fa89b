"""What a server tells in all its answers: fingerprint, role, names of tokens, times; and where tokens lie in a text."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from fake_client import MODEL, FakeClient, resolved_config
from http_client import events, http_client, post, request

from octavo import __version__
from octavo.frontend.http.fingerprint import Fingerprint
from octavo.frontend.http.render.timings import request_metrics
from octavo.frontend.http.schemas.timings import RequestMetrics
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.stats import RequestTimings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = {
    COMPLETIONS: {"model": MODEL, "prompt": "ab", "max_tokens": 2},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
}


def bodies(path: str, config: ServerConfig, **fields: object) -> list[dict]:
    """Return the JSON of an answer, or of every chunk of it."""
    response = post(FakeClient(), path, ASK[path] | fields, config=config)
    return events(response) if fields.get("stream") else [response.json()]


# --- fingerprints -----------------------------------------------------------------------------------


def test_a_fingerprint_names_what_tokens_depend_on() -> None:
    full = Fingerprint("full")
    plain = full.of(resolved_config(), "w")
    assert plain is not None and plain.startswith(f"octavo-{__version__}-") and len(plain.split("-")[-1]) == 8
    assert full.of(resolved_config(max_num_seqs=3, num_threads=1), "w") == plain
    assert full.of(resolved_config(seed=1), "w") != plain
    assert full.of(resolved_config(dtype="float32"), "w") != plain
    assert Fingerprint("hash").of(resolved_config(), "w") == plain
    careless = msgspec.structs.replace(resolved_config(), is_batch_invariant=False)
    assert full.of(careless, "w") != plain
    assert full.of(resolved_config(), "other weights") != plain


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_answer_has_the_fingerprint(path: str, stream: bool) -> None:
    found = {body["system_fingerprint"] for body in bodies(path, ServerConfig(), stream=stream)}
    assert len(found) == 1 and found.pop().startswith("octavo-")
    custom = ServerConfig(fingerprint_mode="custom", fingerprint_value="mine")
    assert {body["system_fingerprint"] for body in bodies(path, custom, stream=stream)} == {"mine"}
    none = ServerConfig(fingerprint_mode="none")
    assert not any(body.get("system_fingerprint") for body in bodies(path, none, stream=stream))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_another_engine_has_its_own_fingerprint_and_defaults(path: str) -> None:
    client = FakeClient()

    async def main() -> list[str]:
        found = []
        async with http_client(client, config=ServerConfig()) as http:
            for defaults in ({}, {"min_p": 0.25}):
                client.config = resolved_config(generation_defaults=defaults)
                found.append((await http.post(path, json=ASK[path])).json()["system_fingerprint"])
        return found

    first, second = asyncio.run(main())
    assert first != second
    assert [asked["params"].min_p for asked in client.requests] == [0.0, 0.25]


# --- roles and names ----------------------------------------------------------------------------------


def test_the_role_of_answers() -> None:
    config = ServerConfig(response_role="helper")
    assert bodies(CHAT, config)[0]["choices"][0]["message"]["role"] == "helper"
    assert bodies(CHAT, config, stream=True)[0]["choices"][0]["delta"]["role"] == "helper"
    # Nobody begins a message here: the last one goes on.
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert bodies(CHAT, config, **continued)[0]["choices"][0]["message"]["role"] == "user"


def test_tokens_as_ids_unless_a_request_says_otherwise() -> None:
    config = ServerConfig(return_tokens_as_token_ids=True)
    (whole,) = bodies(COMPLETIONS, config, logprobs=0)
    assert whole["choices"][0]["logprobs"]["tokens"] == ["token_id:72", "token_id:101"]
    (named,) = bodies(COMPLETIONS, config, logprobs=0, return_tokens_as_token_ids=False)
    assert named["choices"][0]["logprobs"]["tokens"] == ["H", "e"]


# --- times --------------------------------------------------------------------------------------------


def test_times_of_a_request() -> None:
    timings = RequestTimings(queued=1.0, scheduled=1.5, first_token=2.0, finished=4.0)
    assert request_metrics(timings, 5) == RequestMetrics(
        queue_time_ms=500.0,
        time_to_first_token_ms=500.0,
        generation_time_ms=2000.0,
        mean_itl_ms=500.0,
        tokens_per_second=2.0,
    )
    assert request_metrics(RequestTimings(queued=1.0), 0) == RequestMetrics()
    assert request_metrics(timings, 1).mean_itl_ms is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_answers_tell_their_times_when_the_server_says_so(path: str) -> None:
    config = ServerConfig(enable_per_request_metrics=True)
    assert set(bodies(path, config)[0]["metrics"]) == set(RequestMetrics.__struct_fields__)
    chunks = bodies(path, config, stream=True, stream_options={"include_usage": True})
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "metrics" not in bodies(path, ServerConfig())[0]


# --- places of tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_those_of_the_text_where_characters_are_split(stream: bool) -> None:
    client = FakeClient("aü€b")  # a token for each byte
    response = post(client, COMPLETIONS, {"prompt": "x", "max_tokens": 7, "logprobs": 0, "stream": stream})
    answers = events(response) if stream else [response.json()]
    found = [answer["choices"][0]["logprobs"]["text_offset"] for answer in answers]
    assert [offset for part in found for offset in part] == [0, 1, 1, 2, 2, 2, 3]


def test_offsets_behind_an_echoed_prompt_are_those_of_the_text() -> None:
    body = {"prompt": "ü", "max_tokens": 2, "logprobs": 0, "echo": True}
    choice = post(FakeClient("Hi"), COMPLETIONS, body).json()["choices"][0]
    assert choice["text"] == "üHi"
    assert choice["logprobs"]["text_offset"][-2:] == [1, 2]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), [("return_token_offsets", True), ("return_prompt_text", True)])
def test_fields_that_the_response_cannot_contain_are_rejected_by_name(path: str, name: str, value: object) -> None:
    asked = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    rejected = post(FakeClient(), path, {**asked, name: value})
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, name)
    assert post(FakeClient(), path, {**asked, name: type(value)()}).status_code == 200


# --- the tokenizer ----------------------------------------------------------------------------------------


def test_the_tokenizers_settings_are_told_when_the_server_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Fast", "model_max_length": 9}))
    client = FakeClient()
    model = msgspec.structs.replace(client.config.model, tokenizer_path=str(tmp_path))
    client.config = msgspec.structs.replace(client.config, model=model)
    assert request(client, "GET", "/tokenizer_info").status_code == 404
    answer = request(client, "GET", "/tokenizer_info", config=ServerConfig(enable_tokenizer_info_endpoint=True))
    told = answer.json()
    assert (told["tokenizer_class"], told["model_max_length"]) == ("Fast", 9)
    assert "messages" in told["chat_template"]


def test_the_chat_template_that_is_told_is_the_one_in_use(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("mine: {{ messages }}")
    client = FakeClient(chat_template=str(tmp_path / "own.jinja"))
    answer = request(client, "GET", "/tokenizer_info", config=ServerConfig(enable_tokenizer_info_endpoint=True))
    assert answer.json()["chat_template"] == "mine: {{ messages }}"


# --- messages of errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"top_k": -2}, "top_k", "top_k must be at least -1, got -2"),
        ({"guided_json": "{"}, "guided_json", "guided_json is not valid JSON"),
        ({"guided_choice": []}, "guided_choice", "guided_choice must be a list"),
        ({"priority": 2**70}, "priority", "priority: Expected int"),
        ({"priority": 2**63}, "priority", "priority: Expected int"),
    ],
)
def test_errors_name_the_callers_own_field(fields: dict, param: str, message: str) -> None:
    response = post(FakeClient(), COMPLETIONS, ASK[COMPLETIONS] | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_errors_of_logits_processors_name_the_field_of_the_body(path: str, stream: bool) -> None:
    client = FakeClient()
    client.error = InvalidRequestError("extra_args: target must be an integer", "extra_args")
    response = post(client, path, ASK[path] | {"stream": stream, "vllm_xargs": {"target": "seven"}})
    error = (events(response)[-1] if stream and response.status_code == 200 else response.json())["error"]
    assert (error["message"], error["param"]) == ("vllm_xargs: target must be an integer", "vllm_xargs")
    assert error["code"] == 400
