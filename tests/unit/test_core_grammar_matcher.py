"""Masks of grammars allow exactly the tokens that a valid output can continue with, for tokenizers of both kinds."""

import json
import random
import re
import sys
from typing import Any

import jsonschema_rs
import pytest
from examples import examples
from grammar_walks import allowed, tokens_of, walk, walks
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import SCHEMAS, UNENFORCEABLE, schemas
from small_tokenizers import byte_level, sentencepiece

from octavo.core_proc.grammar.matcher import GrammarFault, GrammarTokens, Matcher, source_of
from octavo.protocol.structured import GrammarKind, GrammarSpec

TOKENS = {"byte-level": tokens_of(byte_level()), "sentencepiece": tokens_of(sentencepiece())}


def of_schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text)


def start(spec: GrammarSpec, tokens: GrammarTokens = TOKENS["byte-level"]) -> Matcher:
    return Matcher.compile(tokens, source_of(spec))


def finite(text: str) -> float:
    """A number, or the largest there is: 1e999 is a JSON number, but the validator takes infinity for none."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def check_valid(schema: Any, output: bytes) -> None:
    text = output.decode()  # outputs are whole characters
    value = json.loads(text, parse_float=finite)
    # Other formats are known by their syntax alone: a leap second on any day is a date-time, a name of any length is
    # part of an e-mail address.
    is_exact = isinstance(schema, dict) and schema.get("format") in ("uuid", "ipv4")
    errors = [error.message for error in jsonschema_rs.iter_errors(schema, value, validate_formats=is_exact)]
    assert not errors, f"{text} does not obey {schema}: {errors}"


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_obeys_its_schema(name: str, kind: str) -> None:
    outputs = list(walks(TOKENS[kind], of_schema(SCHEMAS[name]), seed=1, count=30))
    assert len(outputs) >= 10, "hardly any output came to an end"
    for output in outputs:
        check_valid(SCHEMAS[name], output)


@settings(max_examples=examples(50, 120))
@given(schema=schemas(), seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(TOKENS)))
def test_every_output_obeys_any_schema(schema: Any, seed: int, kind: str) -> None:
    for output in walks(TOKENS[kind], of_schema(schema), seed, count=4):
        check_valid(schema, output)


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize(
    "pattern",
    ["[0-9]{3}-[a-z]+", "(yes|no)", "a*b?", "\u00e9{1,3}\U0001f600", "[^x]{2,4}", "/a/+", "(?i)hello", "a|", "x\\.y"],
)
def test_every_output_matches_its_regular_expression(pattern: str, kind: str) -> None:
    outputs = list(walks(TOKENS[kind], GrammarSpec(GrammarKind.REGEX, pattern), seed=2, count=30))
    assert outputs
    for output in outputs:
        assert re.fullmatch(pattern, output.decode()), output


@pytest.mark.parametrize("kind", TOKENS)
def test_every_output_is_of_its_grammar(kind: str) -> None:
    sums = lark('start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]{0,2}/')
    outputs = [output.decode() for output in walks(TOKENS[kind], sums, seed=3, count=40)]
    assert len(outputs) > 20
    for output in outputs:
        assert isinstance(eval(output, {}), int), output


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("name", ["person", "enum", "recursive", "unicode length"])
def test_a_mask_allows_exactly_what_the_grammar_takes(name: str, kind: str) -> None:
    tokens, rng = TOKENS[kind], random.Random(4)
    matcher = start(of_schema(SCHEMAS[name]), tokens)
    for _ in range(10):
        mask, _ = matcher.mask()
        candidates = allowed(mask)
        assert candidates == [token_id for token_id in range(tokens.vocab_size) if matcher.copy().accept(token_id)]
        if not candidates:
            break
        matcher.accept(rng.choice(candidates))


def test_the_mask_of_one_is_its_mask_among_others() -> None:
    matchers = [start(of_schema(schema)) for schema in SCHEMAS.values() for _ in range(2)]
    copies = [matcher.copy() for matcher in matchers]
    forwards = [matcher.mask() for matcher in matchers]
    assert [matcher.mask() for matcher in copies[::-1]][::-1] == forwards
    assert [matcher.mask() for matcher in matchers] == forwards


def test_special_and_unused_tokens_are_no_text() -> None:
    tokens, tokenizer = TOKENS["byte-level"], byte_level()
    mask, _ = start(GrammarSpec(GrammarKind.REGEX, "(.|\n)*"), tokens).mask()
    assert not set(allowed(mask)) & {*tokenizer.special_token_ids, tokenizer.vocab_size}
    assert ord("a") in allowed(mask)
    special = tokenizer.token_id("<|end|>")
    mask, _ = start(lark(f"start: <[{special}]>"), tokens).mask()
    assert allowed(mask) == [special]


def test_the_end_is_told_apart_from_what_may_follow() -> None:
    mask, may_end = start(GrammarSpec(GrammarKind.REGEX, "a*")).mask()
    assert may_end and allowed(mask) == [ord("a")]
    matcher = start(GrammarSpec(GrammarKind.REGEX, "ab"))
    assert [matcher.accept(ord("a")), matcher.is_complete, matcher.accept(ord("b")), matcher.is_complete] == [
        True,
        False,
        True,
        True,
    ]
    assert matcher.mask() == (bytearray(matcher._tokens.num_slot_mask_bytes), True)


def test_forced_text_is_not_forced_tokens() -> None:
    tokens = GrammarTokens([b"a", b"ab", b"abc", b"b", b"c"], [])
    mask, _ = start(lark('start: "abc"'), tokens).mask()
    assert allowed(mask) == [0, 1, 2]


def test_a_copy_goes_its_own_way() -> None:
    matcher = start(GrammarSpec(GrammarKind.REGEX, "a(b|c)"))
    copy = matcher.copy()
    assert matcher.accept(ord("a")) and matcher.accept(ord("b"))
    assert copy.accept(ord("a")) and copy.accept(ord("c")) and copy.is_complete


def test_a_token_without_a_place_changes_nothing() -> None:
    matcher = start(GrammarSpec(GrammarKind.REGEX, "ab"))
    assert not matcher.accept(ord("b"))
    assert not matcher.fault and not matcher.is_complete
    assert matcher.accept(ord("a"))


@pytest.mark.parametrize(
    "spec", [lark("start: start"), GrammarSpec(GrammarKind.REGEX, "b")], ids=["no text", "no token"]
)
def test_a_grammar_that_no_output_fits_reports_a_fault(spec: GrammarSpec) -> None:
    matcher = start(spec, GrammarTokens([b"a", b""], []))
    assert not any(matcher.mask()[0])
    assert matcher.fault == "nothing fits it"


@pytest.mark.parametrize("name", UNENFORCEABLE)
def test_a_keyword_that_cannot_be_enforced_is_named(name: str) -> None:
    with pytest.raises(GrammarFault, match=name):
        start(of_schema(UNENFORCEABLE[name]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec(GrammarKind.REGEX, "(a"), "unclosed group$"),
        (GrammarSpec(GrammarKind.REGEX, "a\\"), "backslash that escapes nothing$"),
        (GrammarSpec(GrammarKind.REGEX, "(?=a)"), "look-around.*not supported$"),
        (lark("start: nothing"), '^at 1.*unknown name: "nothing"$'),
        (lark('start: "a'), "^1"),
        (lark("begin: /a/"), "no start rule"),
        (of_schema({"type": "nothing"}), "Invalid type: nothing$"),
        (of_schema({"$ref": "#/nothing"}), "nothing"),
        (of_schema({"$ref": "https://example.org/schema"}), "https://example.org/schema"),
        (of_schema({"type": "string", "minLength": 3, "maxLength": 1}), "minLength"),
        (of_schema(False), "false"),
    ],
)
def test_a_fault_is_said_in_one_line_of_the_authors_terms(spec: GrammarSpec, message: str) -> None:
    with pytest.raises(GrammarFault, match=message) as caught:
        start(spec)
    assert "\n" not in str(caught.value) and "llguidance" not in str(caught.value)


def test_a_random_walk_finds_the_end_of_a_finite_grammar() -> None:
    assert walk(TOKENS["byte-level"], lark('start: "yes"'), random.Random(0)) == b"yes"
