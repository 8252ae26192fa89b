"""Outputs whose constraint begins after a free prefix, which a marker ends."""

import pytest
from core_fakes import CLIENT, VOCAB_SIZE
from grammar_desk import EOS, STOP, Desk, ends, token

from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.protocol.events import FailureKind, FinishReason
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import ModelVocabulary, Submit
from octavo.protocol.structured import GrammarKind, GrammarSpec


def test_the_grammar_begins_after_the_mark(desk: Desk) -> None:
    desk.start("r", "xy", start_after=b"end")
    for letter in "zend":
        desk.plan()
        assert desk.take_letters() == [["1abcdefghijklmnopqrstuvwxyz"]], "what comes before is free, but for the end"
        desk.commit(token(letter))
    desk.plan()
    assert desk.take_letters() == [["x"]]


@pytest.mark.parametrize("letters", ["zend", "last", "enlast"])
def test_any_of_several_marks_ends_the_prefix(desk: Desk, letters: str) -> None:
    desk.start("r", "xy", start_after=b"end", other_markers=(b"last",))
    for letter in letters:
        desk.plan()
        assert desk.take_letters() == [["1abcdefghijklmnopqrstuvwxyz"]]
        desk.commit(token(letter))
    desk.plan()
    assert desk.take_letters() == [["x"]]


ANYTHING = "01abcdefghijklmnopqrstuvwxyz"


def limited(
    desk: Desk, text: str, kind: GrammarKind, limit: int, outputs: list[int] | None = None
) -> list[ClientEvent]:
    """Submit a request whose free beginning ends with "end" after so many tokens."""
    marker = tuple(token(letter) for letter in "end")
    spec = GrammarSpec(kind, text, "p", b"end", (), limit, marker)
    sampling = SamplingSpec(max_tokens=30, seed=0, eos_token_ids=(EOS,))
    submit = Submit("r", [5, 6, 7], sampling, grammar=spec, resume_output_token_ids=outputs or [])
    return desk.grammars.submit(CLIENT, submit) + desk.wait()


@pytest.mark.parametrize("before", ["", "zz", "ze"])
def test_a_free_prefix_over_its_limit_is_ended_by_forced_tokens(desk: Desk, before: str) -> None:
    assert limited(desk, "xy", GrammarKind.REGEX, len(before)) == []
    for letter in before:
        desk.plan()
        assert desk.take_letters() == [[ANYTHING.replace("0", "")]]
        desk.commit(token(letter))
    for letter in "endxy":
        desk.plan()
        assert desk.take_letters() == [[letter]], "first the mark, then the grammar"
        events = desk.commit(token(letter))
    assert ends(events) == [("r", FinishReason.STOP)]


def test_without_a_form_nothing_is_bound_but_the_end_of_the_beginning(desk: Desk) -> None:
    assert limited(desk, "", GrammarKind.FREE, 1, outputs=[token("z"), token("e")]) == []
    for letter in "nd":
        desk.plan()
        assert desk.take_letters() == [[letter]]
        desk.commit(token(letter))
    desk.plan(), desk.plan()
    assert desk.take_letters() == [[], []], "no step waits for a token any more"
    desk.commit(token("q"))
    assert ends(desk.commit(EOS)) == [("r", FinishReason.STOP)]


def test_without_a_form_the_beginning_may_end_in_its_own_time_and_with_the_request(desk: Desk) -> None:
    assert limited(desk, "", GrammarKind.FREE, 9) == []
    for letter in "aend":
        desk.plan()
        assert desk.take_letters() == [[]]
        desk.commit(token(letter))
    desk.plan()
    assert ends(desk.commit(EOS)) == [("r", FinishReason.STOP)]


def test_while_nothing_can_bind_no_step_waits_for_the_tokens_before(desk: Desk) -> None:
    assert limited(desk, "", GrammarKind.FREE, 2) == []
    desk.plan(), desk.plan()
    assert desk.take_letters() == [[], []]
    desk.commit(token("z"))
    desk.plan()
    assert desk.take_letters() == [], "the mark may have been among the tokens before"
    desk.commit(token("z"))
    assert desk.take_letters() == [["e"]]


@pytest.mark.parametrize(("kind", "text"), [(GrammarKind.FREE, ""), (GrammarKind.REGEX, "xy")])
def test_a_mark_whose_tokens_are_not_allowed_ends_its_request(desk: Desk, kind: GrammarKind, text: str) -> None:
    assert limited(desk, text, kind, 1) == []
    for letter in "ze":
        desk.plan()
        desk.commit(token(letter))
    desk.plan()
    events = desk.commit(token("q"))  # the engine draws any token where nothing is left
    assert ends(events) == [("r", (FailureKind.INVALID, "p"))]


def test_a_mark_that_no_tokens_make_is_rejected(desk: Desk) -> None:
    for marker in ((), (token("e"),), (999,)):
        spec = GrammarSpec(GrammarKind.FREE, "", "p", b"end", (), 1, marker)
        submit = Submit("r", [5], SamplingSpec(max_tokens=3, seed=0), grammar=spec)
        assert ends(desk.grammars.submit(CLIENT, submit)) == [("r", (FailureKind.INVALID, "p"))]


def test_without_end_tokens_what_comes_before_the_grammar_needs_no_mask(desk: Desk) -> None:
    desk.start("r", "xy", start_after=b"end", sampling={"eos_token_ids": (), "stop_token_ids": (STOP,)})
    desk.plan()
    assert desk.take_letters() == [[]]


def test_a_negative_end_token_is_rejected(desk: Desk) -> None:
    sampling = {"eos_token_ids": (EOS, -5)}
    events = desk.submit("r", "xy", start_after=b"end", sampling=sampling) + desk.wait()
    assert ends(events) == [("r", (FailureKind.INVALID, "eos_token_ids"))]
    desk.start("beyond the vocabulary", "xy", start_after=b"end", sampling={"eos_token_ids": (EOS, 2**31)})


def test_the_mark_is_found_over_tokens_and_within_one(compiler: GrammarCompiler) -> None:
    tokens = [b"a", b"<", b"/t", b"h>", b"a</th>b", b"x"]
    own = GrammarCompiler(timeout_s=5)
    own.set_vocabulary(ModelVocabulary([*tokens, *[b""] * (VOCAB_SIZE - len(tokens))], []))
    for outputs in ([1, 2, 3], [0, 1, 1, 2, 3], [4]):
        desk = Desk(own)
        desk.start("r", "xa", start_after=b"</th>", resume_output_token_ids=outputs)
        desk.plan()
        ((_, _, mask),) = desk.workers.supplied[0]
        assert int.from_bytes(mask, "little") == 1 << 5
    own.close()
