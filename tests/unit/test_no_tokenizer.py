"""An engine without a tokenizer: token ids in, token ids out, and errors that name any other field."""

import pytest
from fake_client import MODEL, FakeClient, resolved_config
from http_client import events, post

from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.generation.spec import make_spec
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.events import Finished, FinishReason, TokenLogprobs, Tokens
from octavo.protocol.params import SamplingParams, SamplingSpec
from octavo.protocol.structured import StructuredOutputsParams

COMPLETIONS = "/v1/completions"


class BareClient(FakeClient):
    """A client of such an engine, whose answers have no text."""

    def __init__(self) -> None:
        super().__init__("abc")
        self.tokenizer = Tokenizer.absent()

    def _choice(self, index, params, token_ids, reason):
        choice = super()._choice(index, params, token_ids, reason)
        choice.text = ""
        return choice


def spec_of(params: SamplingParams) -> SamplingSpec:
    return make_spec(
        params, num_prompt_tokens=3, max_model_len=64, seed=0, config=resolved_config(), tokenizer=Tokenizer.absent()
    )


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("stop", SamplingParams(stop=["a"])),
        ("bad_words", SamplingParams(bad_words=["a"])),
        ("structured_outputs", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))),
    ],
)
def test_parameters_in_words_are_rejected(param: str, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError, match="skip-tokenizer-init") as caught:
        spec_of(params)
    assert caught.value.param == param


def test_outputs_are_token_ids_alone() -> None:
    params = SamplingParams(max_tokens=2, logprobs=1, stop_token_ids=[9])
    sequence = Sequence(0, Tokenizer.absent(), [1], params, spec_of(params))
    logprobs = [TokenLogprobs([5, 6], [-0.5, -1.0], 1)]
    sequence.update([Tokens("r", [5], logprobs), Finished("r", FinishReason.LENGTH)])
    output = sequence.snapshot()
    assert (output.text, output.token_ids, output.finish_reason) == ("", [5], "length")
    assert output.logprobs is not None
    assert [(token, entry.decoded_token) for token, entry in output.logprobs[0].items()] == [(5, None), (6, None)]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "text"}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 2], "echo": True}, "echo"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "text"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ],
)
def test_routes_that_need_text_answer_400(path: str, fields: dict, param: str) -> None:
    response = post(BareClient(), path, {"model": MODEL, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "--skip-tokenizer-init" in response.json()["error"]["message"]


def test_answers_to_token_ids_hold_token_ids() -> None:
    asked = {"model": MODEL, "prompt": [1, 2], "logprobs": 0}
    (choice,) = post(BareClient(), COMPLETIONS, asked).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [97, 98, 99], [1, 2])
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98", "token_id:99"]


def test_a_stream_of_token_ids() -> None:
    response = post(BareClient(), COMPLETIONS, {"model": MODEL, "prompt": [1, 2], "stream": True})
    chunks = [chunk["choices"][0]["token_ids"] for chunk in events(response) if chunk["choices"]]
    assert [token for token_ids in chunks for token in token_ids] == [97, 98, 99]
