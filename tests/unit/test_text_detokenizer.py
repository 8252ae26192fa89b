"""Incremental detokenizing: the joined pieces equal the decoded whole."""

from itertools import pairwise

import pytest
import small_tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.tokenizer import Tokenizer

TOKENIZERS = {"byte-level": small_tokenizers.byte_level(), "sentencepiece": small_tokenizers.sentencepiece()}
BYTE_LEVEL, SENTENCEPIECE = TOKENIZERS["byte-level"], TOKENIZERS["sentencepiece"]
EMOJI = "\U0001f600".encode()

every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
# A few ids past the vocabulary: models pad theirs.
token_ids = st.lists(st.integers(0, max(tokenizer.vocab_size for tokenizer in TOKENIZERS.values()) + 3), max_size=24)
any_text = st.text(max_size=24)


def pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Push `ids` cut at some places; return all pieces."""
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pushed = [detokenizer.push(ids[start:end]) for start, end in pairwise(edges)]
    return [*pushed, detokenizer.finish()]


def spans(data: bytes) -> list[tuple[str, int]]:
    """Decode one character at a time: text and end of each; U+FFFD for a maximal part of one."""
    result, start = [], 0
    while start < len(data):
        end = start + 1
        while end < len(data) and len(data[start : end + 1].decode("utf-8", "replace")) == 1:
            end += 1
        result.append((data[start:end].decode("utf-8", "replace"), end))
        start = end
    return result


def expected(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skips_special: bool) -> str:
    """The definition, over the whole: every character that covers at least one byte of the output."""
    hidden = tokenizer.special_token_ids if skips_special else frozenset()
    before = b"".join(tokenizer.token_bytes(token_id) for token_id in prompt if token_id not in hidden)
    after = b"".join(tokenizer.token_bytes(token_id) for token_id in output if token_id not in hidden)
    return "".join(character for character, end in spans(before + after) if end > len(before))


@every_tokenizer
@example(prompt=[0], output=[0xED, 0xA0], cuts=[], skips=False)  # begins a surrogate: two malformed parts
@example(prompt=[0xED], output=[0xA0], cuts=[], skips=False)
@given(prompt=token_ids.filter(bool), output=token_ids, cuts=st.lists(st.integers(0, 24)), skips=st.booleans())
def test_pieces_are_the_characters_of_the_output(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], cuts: list[int], skips: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skips)
    assert "".join(pieces(detokenizer, output, cuts)) == expected(tokenizer, prompt, output, skips_special=skips)


@every_tokenizer
@given(output=token_ids, cuts=st.lists(st.integers(0, 24)), skips=st.booleans())
def test_without_a_prompt_pieces_are_the_decoded_text(
    tokenizer: Tokenizer, output: list[int], cuts: list[int], skips: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skips)
    assert "".join(pieces(detokenizer, output, cuts)) == tokenizer.decode(output, skip_special_tokens=skips)


@every_tokenizer
@given(prompt=any_text, output=any_text, cuts=st.lists(st.integers(0, 24)))
def test_prompt_and_output_together_are_the_whole_text(
    tokenizer: Tokenizer, prompt: str, output: str, cuts: list[int]
) -> None:
    prompt_ids = tokenizer.encode("a" + prompt)
    ids = tokenizer.encode(output)
    text = "".join(pieces(Detokenizer(tokenizer, prompt_ids, skip_special_tokens=False), ids, cuts))
    before = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    assert before + text == tokenizer.decode(prompt_ids + ids, skip_special_tokens=False)


@every_tokenizer
@given(text=any_text, cuts=st.lists(st.integers(0, 24)), skips=st.booleans())
def test_text_is_what_the_tokenizers_library_decodes(
    tokenizer: Tokenizer, text: str, cuts: list[int], skips: bool
) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skips)
    assert "".join(pieces(detokenizer, ids, cuts)) == tokenizer._fast.decode(ids, skip_special_tokens=skips)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=24), cuts=st.lists(st.integers(0, 24)))
def test_any_tokens_of_bytes_are_what_the_tokenizers_library_decodes(ids: list[int], cuts: list[int]) -> None:
    """Malformed bytes too. (Its SentencePiece decoder writes U+FFFD for each byte, ours for each broken character.)"""
    text = "".join(pieces(Detokenizer(BYTE_LEVEL, [], skip_special_tokens=False), ids, cuts))
    assert text == BYTE_LEVEL._fast.decode(ids, skip_special_tokens=False)


@given(ids=st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=24), cuts=st.lists(st.integers(0, 24)))
def test_any_tokens_that_make_characters_are_what_the_tokenizers_library_decodes(
    ids: list[int], cuts: list[int]
) -> None:
    text = "".join(pieces(Detokenizer(SENTENCEPIECE, [], skip_special_tokens=False), ids, cuts))
    if "\ufffd" not in text:
        assert text == SENTENCEPIECE._fast.decode(ids, skip_special_tokens=False)


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_malformed_bytes_are_replaced_as_in_the_whole_text(data: bytes, cuts: list[int]) -> None:
    ids = list(data)
    assert "".join(pieces(Detokenizer(BYTE_LEVEL, []), ids, cuts)) == data.decode("utf-8", "replace")


@every_tokenizer
def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    first = 0 if tokenizer is BYTE_LEVEL else 1
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("the"))
    assert [detokenizer.push([first + byte]) for byte in EMOJI + b"!"] == ["", "", "", "\U0001f600", "!"]


def test_incomplete_character_at_the_end_becomes_one_replacement_character() -> None:
    for first, tokenizer in ((0, BYTE_LEVEL), (1, SENTENCEPIECE)):
        detokenizer = Detokenizer(tokenizer, tokenizer.encode("the"))
        ids = [first + byte for byte in EMOJI[:3]]
        assert detokenizer.push(ids) == ""
        assert detokenizer.finish() == "\ufffd"
        assert tokenizer.decode(ids) == "\ufffd"


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_prompt_cut_inside_a_character_is_not_repeated(kept: int) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, list(b"abc" + EMOJI[:kept]))
    assert detokenizer.push(list(b"!")) == "!"
    assert Detokenizer(BYTE_LEVEL, list(b"abc" + EMOJI[:kept])).finish() == ""


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_output_that_completes_the_prompts_character_shows_it(kept: int) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, list(b"abc" + EMOJI[:kept]))
    assert "".join(detokenizer.push([byte]) for byte in EMOJI[kept:]) == "\U0001f600"


def test_a_replacement_character_that_the_model_wrote_is_kept() -> None:
    first, *rest = "\ufffd".encode()
    assert Detokenizer(BYTE_LEVEL, [first]).push(rest) == "\ufffd"


def test_special_tokens_show_only_when_asked_for() -> None:
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer.encode("the<|end|><tool>")
        shown = Detokenizer(tokenizer, ids, skip_special_tokens=False).push(ids)
        assert shown.strip() == "the<|end|><tool>"
        assert Detokenizer(tokenizer, ids).push(ids).strip() == "the<tool>"


def test_leading_space_belongs_to_a_continuation_and_not_to_a_text() -> None:
    ids = SENTENCEPIECE.encode("the a")
    assert Detokenizer(SENTENCEPIECE, ids).push(ids) == " the a"
    assert Detokenizer(SENTENCEPIECE, []).push(ids) == "the a"
