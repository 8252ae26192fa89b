"""Fill in the middle: `/v1/completions` with `suffix`, for each family of models, and without its tokens."""

from typing import Any

import msgspec
import pytest
from fake_client import MODEL, FakeClient, byte_tokenizer
from http_client import post
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from octavo.frontend.generation.infill import FORMATS
from octavo.frontend.text.tokenizer import Tokenizer

PATH = "/v1/completions"


def client_with(tokens: list[str]) -> FakeClient:
    """Return a client whose tokenizer has these special tokens, in this order behind those of bytes."""
    client = FakeClient("x")
    fast = byte_tokenizer()._fast
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    client.tokenizer = Tokenizer(fast, {"bos_token": "<bos>", "eos_token": "<eos>"}, {})
    model = msgspec.structs.replace(client.config.model, vocab_size=258 + len(tokens))
    client.config = msgspec.structs.replace(client.config, model=model)
    return client


def sent(client: FakeClient, **fields: Any) -> list[Any]:
    """Return the prompt that is generated from: texts, and the special tokens by name."""
    response = post(client, PATH, {"model": MODEL, "prompt": "ab", "suffix": "cd", "max_tokens": 5, **fields})
    assert response.status_code == 200, response.text
    return [
        chr(one) if one < 256 else client.tokenizer.token_name(one)
        for one in client.requests[0]["prompt"]["prompt_token_ids"]
    ]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.families)
def test_the_prompt_of_each_family(form: Any) -> None:
    client = client_with([*form.tokens, *form.ends])
    pre, suf, mid = form.prefix, form.suffix, form.middle
    expected = {
        "Codestral": ["<bos>", suf, "c", "d", pre, "a", "b"],
    }.get(form.families, ["<bos>", pre, "a", "b", suf, "c", "d", mid])
    assert sent(client) == expected
    stops = client.requests[0]["params"].stop_token_ids
    assert {client.tokenizer.token_name(one) for one in stops} == {*form.tokens, *form.ends}


def test_the_settings_of_a_request() -> None:
    tokens = FORMATS[0].tokens
    assert sent(client_with(tokens), add_special_tokens=False)[0] == tokens[0]
    assert sent(client_with(tokens), prompt=[1, 2])[2:4] == [chr(1), chr(2)]
    client = client_with(tokens)
    assert len(sent(client, prompt=["a", "b"], stop_token_ids=[7])) == 7
    assert len(client.requests) == 2 and client.requests[1]["params"].stop_token_ids[0] == 7
    client = client_with(tokens)
    sent(client, ignore_eos=True)
    assert not client.requests[0]["params"].stop_token_ids
    assert sent(client_with(tokens), suffix="") == ["<bos>", "a", "b"]


def test_a_suffix_continues_a_text() -> None:
    """Where tokenizers put a space before a text, the suffix has none."""
    pieces = [("<unk>", 0.0), *[(piece, -1.0) for piece in ("\u2581", "\u263a", *"abcd")]]
    fast = FastTokenizer(models.Unigram(pieces, unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    fast.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>")]
    )
    client = FakeClient("x")
    client.tokenizer = Tokenizer(fast, {}, {})
    body = {"model": MODEL, "prompt": "ab", "suffix": "c d", "max_tokens": 5, "add_special_tokens": False}
    assert post(client, PATH, body).status_code == 200
    names = [fast.id_to_token(one) for one in client.requests[0]["prompt"]["prompt_token_ids"]]
    assert names == ["\u2581<PRE>", "\u2581", "a", "b", "\u2581<SUF>", "c", "\u2581", "d", "\u2581<MID>"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"suffix": 1}, "suffix"),
    ],
    ids=str,
)
def test_what_a_suffix_excludes(fields: dict[str, Any], param: str) -> None:
    client = client_with(FORMATS[0].tokens)
    response = post(client, PATH, {"model": MODEL, "prompt": "ab", "suffix": "cd", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_model_without_the_tokens_says_so() -> None:
    response = post(FakeClient(), PATH, {"model": MODEL, "prompt": "ab", "suffix": "cd"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "suffix")
    assert "Qwen2.5-Coder" in error["message"]
