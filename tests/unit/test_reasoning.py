"""Reasoning told from the answer: what the prompt says of it, where it ends, and how many tokens it took."""

import pytest
from fake_client import byte_tokenizer

from octavo.frontend.reasoning.parser import Opening, Split, num_reasoning_tokens, reasoning_parser
from octavo.protocol.errors import ConfigError

INSIDE, OUTSIDE, UNSURE = Opening.INSIDE, Opening.OUTSIDE, Opening.UNSURE
R1, QWEN = reasoning_parser("deepseek_r1"), reasoning_parser("qwen3")


@pytest.mark.parametrize(
    ("parser", "prompt", "continued", "opening"),
    [
        (QWEN, "<|assistant|>", "", UNSURE),
        (QWEN, "<|assistant|><think>\n", "", INSIDE),
        (QWEN, "<|assistant|><think>\n\n</think>\n\n", "", OUTSIDE),
        (QWEN, "the user says <think>; <|assistant|>", "", UNSURE),
        (R1, "<|assistant|>", "", INSIDE),
        (R1, "<|assistant|><think></think>", "", OUTSIDE),
        (QWEN, "<|assistant|>so", "so", OUTSIDE),
        (R1, "<|assistant|><think>so", "<think>so", INSIDE),
        (R1, "<|assistant|><think>so</think>now", "<think>so</think>now", OUTSIDE),
    ],
)
def test_the_prompt_tells_how_the_answer_begins(parser, prompt, continued, opening) -> None:
    assert parser.opening(prompt, continued) is opening


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "rest"),
    [
        (INSIDE, "\nhm\n\nso\n</think>\n\nHi there\n", "hm\n\nso", "Hi there\n"),
        (INSIDE, "<think>hm</think>Hi", "hm", "Hi"),
        (INSIDE, "hm, cut", "hm, cut", ""),
        (INSIDE, "", "", ""),
        (UNSURE, "<think>\nhm\n</think>\n\n  Hi", "hm", "  Hi"),
        (UNSURE, "<think>\n\n</think>\n\nHi", "", "Hi"),
        (UNSURE, "Hi, no <think>thought</think>", "", "Hi, no <think>thought</think>"),
        (UNSURE, "<thin", "", "<thin"),
        (OUTSIDE, "<think>hm</think>Hi", "", "<think>hm</think>Hi"),
        (INSIDE, "a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_whole_texts(opening, text, reasoning, rest) -> None:
    assert R1.split(text, opening, is_final=True) == Split(reasoning, rest)


def test_what_may_be_a_tag_is_held_back() -> None:
    assert QWEN.split("  <thi", UNSURE, is_final=False) == Split("", None)
    assert QWEN.split("<this", UNSURE, is_final=False) == Split("", "<this")
    assert QWEN.split("<think>a </thin", UNSURE, is_final=False) == Split("a", None)
    assert QWEN.split("<think>a </think>\n", UNSURE, is_final=False) == Split("a", None)
    assert QWEN.split("<think>a </thing", UNSURE, is_final=False) == Split("a </thing", None)


@pytest.mark.parametrize(
    ("opening", "text", "count"),
    [
        (INSIDE, "hm</think>Hi", 10),
        (INSIDE, "hm", 2),
        (INSIDE, "", 0),
        (UNSURE, "<think>hm</think>Hi", 17),
        (UNSURE, "Hi</think>", 0),
        (UNSURE, "<thi", 0),
        (OUTSIDE, "hm</think>Hi", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(opening, text, count) -> None:
    # One token for each byte.
    tokenizer = byte_tokenizer()
    assert num_reasoning_tokens(QWEN, opening, tokenizer.encode(text, False), tokenizer) == count


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reasoning parser 'o1'") as caught:
        reasoning_parser("o1")
    assert "qwen3" in caught.value.hint
