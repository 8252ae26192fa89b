"""Separating reasoning from the answer: its state after the prompt, its end, and its number of tokens."""

import pytest
from fake_client import byte_tokenizer

from octavo.frontend.reasoning.parser import ReasoningState, Split
from octavo.frontend.reasoning.registry import reasoning_parser
from octavo.frontend.reasoning.tokens import num_reasoning_tokens
from octavo.frontend.tools.answer import AnswerDelta, AnswerFormat
from octavo.protocol.errors import ConfigError

INSIDE, OUTSIDE, UNDECIDED = ReasoningState.INSIDE, ReasoningState.OUTSIDE, ReasoningState.UNDECIDED
R1, QWEN = reasoning_parser("deepseek_r1"), reasoning_parser("qwen3")


@pytest.mark.parametrize(
    ("parser", "prompt", "continued", "state"),
    [
        (QWEN, "<|assistant|>", "", UNDECIDED),
        (QWEN, "<|assistant|><think>\n", "", INSIDE),
        (QWEN, "<|assistant|><think>\n\n</think>\n\n", "", OUTSIDE),
        (QWEN, "the user says <think>; <|assistant|>", "", UNDECIDED),
        (R1, "<|assistant|>", "", INSIDE),
        (R1, "<|assistant|><think></think>", "", OUTSIDE),
        (QWEN, "<|assistant|>so", "so", OUTSIDE),
        (R1, "<|assistant|><think>so", "<think>so", INSIDE),
        (R1, "<|assistant|><think>so</think>now", "<think>so</think>now", OUTSIDE),
    ],
)
def test_the_prompt_tells_how_the_answer_begins(parser, prompt, continued, state) -> None:
    assert parser.initial_state(prompt, continued) is state


@pytest.mark.parametrize(
    ("state", "text", "reasoning", "rest"),
    [
        (INSIDE, "\nhm\n\nso\n</think>\n\nHi there\n", "hm\n\nso", "Hi there\n"),
        (INSIDE, "<think>hm</think>Hi", "hm", "Hi"),
        (INSIDE, "hm, cut", "hm, cut", ""),
        (INSIDE, "", "", ""),
        (UNDECIDED, "<think>\nhm\n</think>\n\n  Hi", "hm", "  Hi"),
        (UNDECIDED, "<think>\n\n</think>\n\nHi", "", "Hi"),
        (UNDECIDED, "Hi, no <think>thought</think>", "", "Hi, no <think>thought</think>"),
        (UNDECIDED, "<thin", "", "<thin"),
        (OUTSIDE, "<think>hm</think>Hi", "", "<think>hm</think>Hi"),
        (INSIDE, "a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_whole_texts(state, text, reasoning, rest) -> None:
    assert R1.split(text, state, is_final=True) == Split(reasoning, rest)


def test_text_that_may_begin_a_tag_is_held_back() -> None:
    assert QWEN.split("  <thi", UNDECIDED, is_final=False) == Split("", None)
    assert QWEN.split("<this", UNDECIDED, is_final=False) == Split("", "<this")
    assert QWEN.split("<think>a </thin", UNDECIDED, is_final=False) == Split("a", None)
    assert QWEN.split("<think>a </think>\n", UNDECIDED, is_final=False) == Split("a", "")
    assert QWEN.split("<think>a </thing", UNDECIDED, is_final=False) == Split("a </thing", None)


@pytest.mark.parametrize(
    ("state", "text", "count"),
    [
        (INSIDE, "hm</think>Hi", 10),
        (INSIDE, "hm", 2),
        (INSIDE, "", 0),
        (UNDECIDED, "<think>hm</think>Hi", 17),
        (UNDECIDED, "Hi</think>", 0),
        (UNDECIDED, "<thi", 0),
        (OUTSIDE, "hm</think>Hi", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(state, text, count) -> None:
    # One token for each byte.
    tokenizer = byte_tokenizer()
    assert num_reasoning_tokens(QWEN, state, tokenizer.encode(text, False), tokenizer) == count


def test_an_unknown_parser_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown reasoning parser 'o1'") as caught:
        reasoning_parser("o1")
    assert "qwen3" in caught.value.hint


@pytest.mark.parametrize("begin", ["<think>hm</think>", "<think></think>"])
def test_line_breaks_after_the_reasoning_are_read_once(begin: str) -> None:
    stream = AnswerFormat(QWEN, UNDECIDED).open()
    assert stream.push(begin).content == ""
    for _ in range(100):
        assert stream.push("\n") == AnswerDelta()
        assert stream._text == ""
    assert stream.push("\n Hi").content == " Hi" and stream.push("\n").content == "\n"


def test_line_breaks_without_reasoning_are_content() -> None:
    for state in (UNDECIDED, OUTSIDE):
        stream = AnswerFormat(QWEN, state).open()
        deltas = [stream.push(piece) for piece in ("", "\n", "\n", "Hi")] + [stream.push("", is_final=True)]
        assert "".join(delta.content for delta in deltas) == "\n\nHi"
