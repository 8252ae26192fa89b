"""The official client with strict validation of responses, over a real engine: models, completions, streams, errors.

What its types do not allow is as OpenAI's own API has it: in a stream of plain completions `finish_reason` is null up
to the last chunk, and an echoed prompt's first token has no logprob. There only the last chunk, or no echo, is checked.
"""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.completion import Completion
from servers import serve
from tiny_models import make_tiny

SMALL = ["--max-model-len", "256", "--max-num-seqs", "4", "--served-model-name", "tiny", "--dtype", "float32"]
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 6, "seed": 1}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model: Path = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    with (
        serve(model, *SMALL, "--api-key", "k") as server,
        openai.OpenAI(
            api_key="k",
            base_url=server.wait_until_ready().url + "/v1",
            max_retries=0,
            _strict_response_validation=True,
        ) as client,
    ):
        yield client


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").owned_by == "octavo"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["a"]}, {"response_format": {"type": "text"}}],
    ids=str,
)
def test_chat_whole_and_streamed(api: openai.OpenAI, fields) -> None:
    whole = api.chat.completions.create(**TALK, **fields)
    assert whole.usage is not None
    texts = {choice.index: choice.message.content for choice in whole.choices}
    reasons = {choice.index: choice.finish_reason for choice in whole.choices}
    streamed = dict.fromkeys(texts, "")
    ends = {}
    for chunk in api.chat.completions.create(**TALK, **fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        if chunk.usage is not None:
            assert chunk.usage.total_tokens == whole.usage.total_tokens and not chunk.choices
    assert (streamed, ends) == (texts, reasons)


def test_completions_whole_and_streamed(api: openai.OpenAI) -> None:
    ask = {"model": "tiny", "prompt": ["a b", "c"], "max_tokens": 5, "seed": 1, "logprobs": 2}
    whole = api.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1]
    with openai.OpenAI(api_key="k", base_url=api.base_url) as lenient:
        chunks = list(lenient.completions.create(**ask, stream=True))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        last = next(chunk for chunk in chunks if chunk.choices[0] is parts[-1])
        assert Completion.model_validate(last.to_dict(), strict=True).choices[0].finish_reason == choice.finish_reason


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
    ],
)
def test_errors_name_their_field(api: openai.OpenAI, change, error, param) -> None:
    for stream in (False, True):
        with pytest.raises(error) as raised:
            api.chat.completions.create(**TALK | change, stream=stream)
        assert raised.value.param == param and raised.value.body["message"]
        assert raised.value.response.headers["x-request-id"] == raised.value.request_id


def test_a_wrong_key(api: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="other").models.list()
