"""Renderers in cases that HTTP requests rarely reach: odd ranks, odd tokens, deltas without text."""

import json

import msgspec
import pytest
from fake_client import byte_tokenizer
from small_tokenizers import byte_level, sentencepiece

from octavo.frontend.http.render.answer import AnswerStyle
from octavo.frontend.http.render.chat import ChatChunks
from octavo.frontend.http.render.completions import CompletionAnswer, EchoStyle
from octavo.frontend.http.render.frame import MARK, TextFrame
from octavo.frontend.http.render.logprobs import (
    TextPlace,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from octavo.frontend.http.render.usage import UsageCount
from octavo.frontend.http.schemas.chat import ChatChunk, ChunkChoice, Delta
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.frontend.text.tokenizer import Tokenizer

NAMES = TokenNames(byte_tokenizer())
A, B, C, D = b"ABCD"


def position(own: int, rank: int, *others: int) -> dict[int, Logprob]:
    return {own: Logprob(-float(rank), rank), **{other: Logprob(-10.0) for other in others}}


@pytest.mark.parametrize(
    ("entry", "num_top", "expected"),
    [
        (position(A, 1, B, C), 2, [A, B]),
        (position(A, 2, B, C), 2, [B, A]),
        (position(A, 3, B, C), 3, [B, C, A]),
        (position(A, 9, B, C), 2, [B, C]),
        (position(A, 1), 0, []),
        (position(A, 2, B, C, D), -1, [B, A, C, D]),
    ],
    ids=str,
)
def test_top_logprobs_are_in_order_of_rank(entry, num_top, expected) -> None:
    (rendered,) = chat_logprobs([A], [entry], NAMES, num_top).content
    assert [ord(top.token) for top in rendered.top_logprobs] == expected
    assert rendered.token == "A"


def test_part_of_a_character_is_told_by_its_bytes() -> None:
    (rendered,) = chat_logprobs([0xC3], [position(0xC3, 1)], NAMES, 0).content
    assert (rendered.token, rendered.bytes) == ("\ufffd", [0xC3])


def test_minus_infinity_becomes_a_number() -> None:
    entry = {A: Logprob(float("-inf"), 9)}
    assert chat_logprobs([A], [entry], NAMES, 0).content[0].logprob == -9999.0
    assert completion_logprobs([A], [entry], NAMES, TextPlace(0)).token_logprobs == [-9999.0]
    assert prompt_logprobs([None, entry])[1][str(A)].logprob == -9999.0


class TwoWaysToWrite:
    """A vocabulary in which tokens 1 and 2 have one text, and 3 is the character U+FFFD itself."""

    special_token_ids = frozenset[int]()

    def token_string(self, token_id: int) -> str:
        return "\ufffd" if token_id == 3 else "a"

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        return self.token_string(token_id).encode()


def test_parts_of_characters_are_kept_apart_by_their_bytes() -> None:
    entry = {0xC3: Logprob(-1.0, 1), 0xC4: Logprob(-2.0, 2), A: Logprob(-3.0, 3)}
    rendered = completion_logprobs([0xC3], [entry], NAMES, TextPlace(0))
    assert rendered.top_logprobs == [{"bytes:\\xc3": -1.0, "bytes:\\xc4": -2.0, "A": -3.0}]
    assert rendered.tokens == ["bytes:\\xc3"], "the key under which its alternatives are found"
    whole = completion_logprobs([3], [{3: Logprob(-1.0, 1)}], TokenNames(TwoWaysToWrite()), TextPlace(0))
    assert whole.tokens == ["\ufffd"]


def test_of_tokens_of_one_text_the_most_likely_stays() -> None:
    entry = {0xC3: Logprob(-1.0, 1), 0xC4: Logprob(-2.0, 2)}
    # The chosen one, which stands first, is the less likely: who compares it with the largest must see that.
    unlikely = {2: Logprob(-2.0, 2), 1: Logprob(-1.0, 1)}
    rendered = completion_logprobs([2], [unlikely], TokenNames(TwoWaysToWrite()), TextPlace(0))
    assert (rendered.token_logprobs, rendered.top_logprobs) == ([-2.0], [{"a": -1.0}])
    as_ids = TokenNames(byte_tokenizer(), as_ids=True)
    assert completion_logprobs([0xC3], [entry], as_ids, TextPlace(0)).top_logprobs == [
        {"token_id:195": -1.0, "token_id:196": -2.0}
    ]


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", ["the thing", " a \u20ac", "", "<|start|>", "<|start|><|start|>"])
def test_a_prompts_tokens_add_up_to_its_text_without_the_special_one_in_front(tokenizer: Tokenizer, text: str) -> None:
    names, start = TokenNames(tokenizer), tokenizer.token_id("<|start|>")
    own = tokenizer.encode(text, add_special_tokens=False)
    for token_ids in (own, [start, *own]):
        assert b"".join(names.prompt_bytes(token_ids, text)).decode() == text


def test_offsets_of_an_echoed_prompt_begin_where_its_text_does() -> None:
    tokenizer = byte_level()
    token_ids = [tokenizer.token_id("<|start|>"), *b"ab"]
    entries = [None, *[{token_id: Logprob(-1.0, 1)} for token_id in b"ab"]]
    rendered = completion_logprobs(token_ids, entries, TokenNames(tokenizer), TextPlace(0), "ab")
    assert rendered.text_offset == [0, 0, 1]


def output(text: str, token_ids: list[int], *, finish_reason: str | None = None, **fields) -> RequestOutput:
    choice = CompletionOutput(0, text, token_ids, finish_reason=finish_reason, **fields)
    return RequestOutput("r", None, [1, 2, 3], [choice], finish_reason is not None, num_cached_tokens=2)


def style(**fields) -> AnswerStyle:
    return AnswerStyle(id="x", created=1, model="m", names=NAMES, **fields)


def test_token_that_is_part_of_a_character_makes_no_chunk() -> None:
    chunks = ChatChunks(style(), n=1)
    assert len(chunks.render(output("", [0xC3]))) == 1  # the opening
    assert chunks.render(output("", [0xC3])) == []
    assert len(chunks.render(output("\u00e9", [0xA9]))) == 1
    answer = CompletionAnswer(style(), n=1)
    assert answer.render(output("", [0xC3]), 0) == []
    assert len(answer.render(output("\u00e9", [0xA9]), 0)) == 1


def test_token_without_text_is_shown_to_who_asked_for_tokens() -> None:
    chunks = ChatChunks(style(has_token_ids=True), n=1)
    opening, first = map(json.loads, chunks.render(output("", [0xC3])))
    assert opening["prompt_token_ids"] == [1, 2, 3]
    assert first["choices"][0]["token_ids"] == [0xC3]
    first = json.loads(CompletionAnswer(style(has_token_ids=True), n=1).render(output("", [0xC3]), 0)[0])
    assert (first["choices"][0]["token_ids"], first["choices"][0]["prompt_token_ids"]) == ([0xC3], [1, 2, 3])


def test_token_without_text_is_shown_to_who_asked_for_logprobs() -> None:
    fields = {"logprobs": [position(257, 1)], "finish_reason": "stop"}
    *_, shown, closing = map(json.loads, ChatChunks(style(num_logprobs=0), n=1).render(output("", [257], **fields)))
    assert shown["choices"][0]["logprobs"]["content"][0]["token"] == "<eos>"
    assert closing["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


def test_stop_reason_is_told() -> None:
    chunks = ChatChunks(style(), n=1).render(output("a", [A], finish_reason="stop", stop_reason="END"))
    assert json.loads(chunks[-1])["choices"][0]["stop_reason"] == "END"


def test_usage_counts_a_prompt_once_and_every_token() -> None:
    usage = UsageCount()
    for _ in range(3):
        usage.add(output("a", [A, B]), prompt_index=0)
    usage.add(output("a", [A]), prompt_index=1)
    total = usage.total()
    assert (total.prompt_tokens, total.completion_tokens, total.total_tokens) == (6, 7, 13)
    assert total.prompt_tokens_details.cached_tokens == 4


def test_every_choice_of_a_stream_echoes_the_prompt_with_its_logprobs() -> None:
    echo = EchoStyle(["ABC"])
    answer = CompletionAnswer(style(num_logprobs=0), n=2, echo=echo)
    chunks = []
    for index, entries in enumerate([[None, position(B, 1), position(C, 1)], None]):
        choice = CompletionOutput(index, "D", [D], logprobs=[position(D, 1)])
        # The prompt's logprobs come once, with the choice that is first.
        news = RequestOutput("r", None, [A, B, C], [choice], finished=False, prompt_logprobs=entries)
        chunks += answer.render(news, 0)
    first, second = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in chunks]
    assert first == second
    assert second["tokens"] == list("ABCD")
    assert second["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["logprobs", "finish_reason", MARK, '"', "\\", "\u2028\n", "org/fake", ""])
def test_frame_puts_any_text_in_its_place(text: str) -> None:
    def chunk(content: str) -> bytes:
        choice = ChunkChoice(index=0, delta=Delta(content=content))
        return msgspec.json.encode(
            ChatChunk(id=f"chatcmpl-{MARK}", created=1, model=MARK, choices=[choice], usage=None)
        )

    assert TextFrame(chunk(MARK)).wrap(text) == chunk(text)
