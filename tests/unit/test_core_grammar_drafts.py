"""Drafts for requests with a grammar: what grammars determine, what of proposals fits, and the masks after drafts."""

import json
from typing import Any

import pytest
from core_fakes import CLIENT
from grammar_desk import EOS, VOCABULARY, Desk, letters, token
from grammar_walks import tokens_of
from small_tokenizers import byte_level, sentencepiece

from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.constraint import Constraint
from octavo.core_proc.grammar.matcher import GrammarTokens, Matcher, source_of
from octavo.core_proc.grammar.spelling import Speller
from octavo.core_proc.grammar.white_space import white_space
from octavo.core_proc.request import Request
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepResult
from octavo.protocol.structured import GrammarKind, GrammarSpec

BYTES = GrammarTokens.of_bytes()
GRAMMAR = ResolvedSpeculation(method="grammar", max_depth=8)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["positive", "negative"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def state(kind: GrammarKind, text: str, output: str = "") -> Matcher:
    matcher = Matcher.compile(BYTES, source_of(GrammarSpec(kind, text)))
    assert all(map(matcher.accept, output.encode()))
    return matcher


@pytest.mark.parametrize(
    ("output", "following"),
    [
        ("", '{"name": "'),
        ('{"', 'name": "'),
        ('{"name": "B', ""),
        ('{"name": "B",', ' "age":'),
        ('{"name":"B",', ' "age":'),
        ('{"name":"B","age":4,', '"kind":"'),
        ('{\n  "name": "B",', '\n  "age":'),
        ('{"name": "B", "age": 4, "kind": "', ""),
        ('{"name": "B", "age": 4, "kind": "p', 'ositive"'),
    ],
)
def test_json_goes_on_as_its_schema_determines(output: str, following: str) -> None:
    draft = state(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), output).continuation(64)
    assert bytes(draft).decode() == following


def test_the_token_that_completes_an_output_is_left_out() -> None:
    assert bytes(state(GrammarKind.REGEX, "(yes|no)!", "y").continuation(9)) == b"es"
    assert bytes(state(GrammarKind.REGEX, "(yes|no)!", "yes").continuation(9)) == b""
    assert bytes(state(GrammarKind.REGEX, "yes+", "y").continuation(9)) == b"es"
    assert bytes(state(GrammarKind.REGEX, "a{300}").continuation(20)) == b"a" * 20


def test_white_space_is_that_of_the_same_place_before() -> None:
    assert white_space(b'{"a"', b":") == b""
    assert white_space(b'{"a" :1, "b"', b":") == b" "
    assert white_space(b'[\n {"a":1},\n\t{"b":1},', b"{") == b"\n\t"
    assert white_space(b"", b"{") == b""


def test_lines_are_indented_as_those_before() -> None:
    text = json.dumps({"a": 1, "b": {"c": "d", "e": [1, 2], "f": {}}, "g": [], "h": "i"}, indent=2).encode()
    begins = [
        place
        for place in range(20, len(text))
        if text[place : place + 1].isspace() and not text[place - 1 : place].isspace()
    ]
    for place in begins:
        rest = text[place:].lstrip()
        space = text[place : len(text) - len(rest)]
        for done in range(len(space)):
            assert white_space(text[: place + done], rest[:1]) == space[done:], text[: place + done]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_texts_are_spelled_as_the_tokenizer_does(make: Any) -> None:
    tokenizer = make()
    tokens = tokens_of(tokenizer).tokens
    speller = Speller(tokens, sorted(tokenizer.special_token_ids))
    texts = ['{"name": "', ', "the other": ["', '\n    "and": {', "in the beginning", "caf\u00e9"]
    for text in texts:
        token_ids = speller.spell(text.encode())
        assert b"".join(tokens[token_id] for token_id in token_ids) == text.encode()
        if make is byte_level:  # the other one puts a space before each text
            assert token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert Speller([b"a", b"b", b"ab"], [1]).spell(b"ab") == [2]
    assert Speller([b"a", b"b", b"ab"], [2]).spell(b"ab") == [0, 1]
    assert Speller([b"a"], []).spell(b"ab") == []


@pytest.fixture
def speculating() -> Any:
    compiler = GrammarCompiler(timeout_s=5)
    desk = Desk(compiler, speculation=GRAMMAR)
    desk.grammars.set_vocabulary(VOCABULARY)
    yield desk
    compiler.close()


def commit(desk: Desk, text: str, counts: list[int]) -> list[Any]:
    plan = desk.plans.pop(0)
    result = StepResult(plan.sequence, pack_ids(map(token, text)), [], [], counts=counts)
    return desk.scheduler.commit(result) + desk.grammars.on_step()


def test_a_step_verifies_what_a_grammar_determines(speculating: Desk) -> None:
    speculating.start("r", "x(abc|def)y*z")
    assert speculating.plan().draft_tokens == []
    speculating.commit(token("x"))
    assert speculating.plan().draft_tokens == []
    speculating.take_letters()
    speculating.commit(token("a"))
    plan = speculating.plan()
    assert [list(draft) for _, draft in plan.draft_tokens] == [[token("b"), token("c")]]
    ((first, second, third),) = speculating.workers.supplied
    assert [first[:2], second[:2], third[:2]] == [(0, 0), (0, 1), (0, 2)]
    assert [letters(mask) for _, _, mask in (first, second, third)] == ["b", "c", "yz"]
    commit(speculating, "bcy", [3])
    assert speculating.plan().draft_tokens == []
    (((_, end),),) = [speculating.commit(token("z"))[-1:]]
    assert end.reason.name == "STOP"


def test_no_draw_is_made_behind_an_output_that_is_complete(speculating: Desk) -> None:
    speculating.start("r", "ab")
    speculating.plan()
    speculating.commit(token("a"))
    (request,) = speculating.scheduler.requests.values()
    constraint = speculating.grammars._constraints[request.key]
    assert list(constraint.continuation([token("b"), token("b")], 5)) == []
    assert list(constraint.masks_after([token("b"), token("b")])) == [b"", b""]
    assert list(constraint.masks_after([token("c")])) == [b""], "a draft that the grammar excludes"


def test_proposals_are_cut_where_they_do_not_fit(speculating: Desk) -> None:
    speculating.start("r", "[abc]*de[abc]*")
    speculating.plan()
    speculating.commit(token("a"))
    (request,) = speculating.scheduler.requests.values()
    constraint = speculating.grammars._constraints[request.key]
    for proposed, draft in (("abcx", "abc"), ("bd", "bde"), ("x", ""), ("abd", "ab")):
        found = constraint.continuation(list(map(token, proposed)), 3 if proposed != "abd" else 2)
        assert list(found) == list(map(token, draft))


def test_the_marker_that_ends_reasoning_is_drafted_when_it_is_forced(speculating: Desk) -> None:
    spec = GrammarSpec(
        GrammarKind.REGEX,
        "qr*s",
        start_after=b"xyz",
        max_free_tokens=2,
        start_after_token_ids=tuple(map(token, "xyz")),
    )
    matcher = Matcher.compile(GrammarTokens(VOCABULARY.tokens, [EOS]), source_of(spec))
    submit = Submit("r", [5, 6, 7], SamplingSpec(max_tokens=9, seed=0), grammar=spec)
    request = Request(CLIENT, submit, 0, 0.0)
    constraint = Constraint(request, matcher, spec, VOCABULARY)
    assert list(constraint.continuation([token("a"), token("b")], 8)) == list(map(token, "abxyzq"))
    request.token_ids.extend(map(token, "ab"))
    constraint.advance()
    assert list(constraint.continuation([], 8)) == list(map(token, "xyzq"))
    masks = [mask and letters(mask) for mask in constraint.masks_after(list(map(token, "xyzq")))]
    assert masks == ["y", "z", "q", "rs"]
