"""Requests with grammars in the core: waiting, rejections, and which masks belong to which steps."""

import os

import pytest
from core_fakes import CLIENT
from grammar_desk import EOS, STOP, VOCABULARY, Desk, ends, token

from octavo.core_proc.grammar import grammars as grammars_module
from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.sandbox import CompilerSandbox, CpuBudgetExceeded, GrammarRejected
from octavo.protocol.config import StructuredConfig
from octavo.protocol.config.structured_outputs import resolve_structured_output
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.structured import GrammarKind, GrammarPart


def test_a_request_waits_for_its_grammar_outside_of_the_scheduler(desk: Desk) -> None:
    assert desk.submit("r", "wait(a|b)") == []
    assert desk.grammars.num_waiting == 1 and desk.grammars.is_waiting((CLIENT, "r"))
    assert not desk.scheduler.has_requests
    assert desk.wait() == []
    assert desk.scheduler.has_requests and desk.grammars.num_waiting == 0


def test_a_known_grammar_needs_no_wait(desk: Desk, compiled: list[str]) -> None:
    desk.start("first", "known+")
    assert desk.submit("second", "known+") == []
    assert len(desk.scheduler.requests) == 2
    assert compiled == ["known+"]


def test_requests_with_the_same_grammar_wait_for_one_compilation(desk: Desk, compiled: list[str]) -> None:
    for name in "abc":
        desk.submit(name, "same{3}")
    assert desk.wait() == []
    assert len(desk.scheduler.requests) == 3
    assert compiled == ["same{3}"]


def test_a_faulty_grammar_ends_those_who_have_it_and_nobody_else(desk: Desk) -> None:
    desk.submit("bad", "(a")
    desk.submit("worse", "(a")
    desk.submit("good", "fine")
    fault = (FailureKind.INVALID, "structured_outputs.regex")
    events = desk.wait()
    assert ends(events) == [("bad", fault), ("worse", fault)]
    assert all("unclosed group" in event.message for _, event in events if isinstance(event, Failed))
    assert [key[1] for key in desk.scheduler.requests] == ["good"]


TEXT = '{"type":"string"}'
NOT = '{"not":{}}'


@pytest.mark.parametrize(
    ("whole", "parts", "param", "words"),
    [
        ([TEXT, NOT, '{"if":{}}'], [TEXT, NOT, '{"if":{}}'], "second", "not"),
        ([TEXT, NOT], [TEXT], "structured_outputs.regex", "not"),
    ],
    ids=["the first of several", "none by itself"],
)
def test_the_part_that_is_no_grammar_is_to_blame(whole: list[str], parts: list[str], param: str, words: str) -> None:
    desk = Desk(GrammarCompiler(timeout_s=1))
    desk.grammars.set_vocabulary(VOCABULARY)
    named = tuple(GrammarPart(name, text) for name, text in zip(["first", "second", "third"], parts, strict=False))
    desk.submit("r", f'{{"anyOf":[{",".join(whole)}]}}', kind=GrammarKind.JSON_SCHEMA, parts=named)
    ((_, failed),) = desk.wait()
    assert isinstance(failed, Failed) and failed.kind is FailureKind.INVALID
    assert failed.param == param
    assert words in failed.message
    desk.compiler.close()


def test_after_the_time_of_one_grammar_no_further_part_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def slow(self: CompilerSandbox, source: str, cpu_budget_s: float | None) -> float:
        tried.append(source)
        if len(tried) == 1:
            raise GrammarRejected("the whole of it")
        return 0.6

    monkeypatch.setattr(CompilerSandbox, "check", slow)
    compiler = GrammarCompiler(timeout_s=1)
    parts = tuple(str(number) for number in range(5))
    monkeypatch.setattr(CompilerSandbox, "warm_up", lambda self: None)
    result = compiler._compile(CompilerSandbox(1), (GrammarKind.JSON_SCHEMA, "{}", parts), None)
    assert (result.message, result.part, len(tried)) == ("the whole of it", None, 3)
    tried.clear()
    with pytest.raises(CpuBudgetExceeded):
        compiler._compile(CompilerSandbox(1), (GrammarKind.JSON_SCHEMA, "{}", parts), 1.0)
    assert len(tried) == 3, "many parts are costly together"
    os.close(compiler.wake_fd)


def test_grammars_that_are_rejected_at_intake(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    untaught = Desk(GrammarCompiler(timeout_s=5))
    assert ends(untaught.submit("r", "a")) == [("r", (FailureKind.INVALID, "structured_outputs.regex"))]
    os.close(untaught.compiler.wake_fd)
    narrow = Desk(desk.compiler, structured_output=resolve_structured_output(StructuredConfig(max_grammar_bytes=10)))
    assert ends(narrow.submit("r", "\u00e9" * 6)) == [("r", (FailureKind.INVALID, "structured_outputs.regex"))]
    assert ends(narrow.submit("r", "a", parts=(GrammarPart("p", "{}" * 3),) * 2)) == [
        ("r", (FailureKind.INVALID, "structured_outputs.regex"))
    ]
    assert desk.submit("twice", "twice") == []
    assert ends(desk.submit("twice", "twice")) == [("twice", (FailureKind.INVALID, "request_id"))]
    monkeypatch.setattr(grammars_module, "MAX_WAITING", 1)
    assert ends(desk.submit("late", "late")) == [("late", (FailureKind.OVERLOADED, None))]
    assert desk.wait() == []
    assert ends(desk.submit("twice", "twice")) == [("twice", (FailureKind.INVALID, "request_id"))]


def test_a_waiting_request_can_be_aborted(desk: Desk) -> None:
    desk.submit("r", "abort me")
    desk.submit("s", "abort me")
    assert ends(desk.grammars.abort(CLIENT, ["r", "unknown"])) == [("r", FinishReason.ABORT)]
    assert desk.grammars.abort(CLIENT, ["r"]) == []
    assert desk.wait() == []
    assert [key[1] for key in desk.scheduler.requests] == ["s"]


def test_a_name_in_use_leaves_the_request_that_has_it_alone(desk: Desk) -> None:
    desk.submit("r", "compiled (later|too late)")
    sampling = SamplingSpec(max_tokens=9, seed=0)
    assert desk.scheduler.submit(CLIENT, Submit("r", [5, 6, 7], sampling)) == []
    assert ends(desk.wait()) == [("r", (FailureKind.INVALID, "request_id"))]
    assert not desk.plan().awaits_masks
    assert ends(desk.commit(token("z"))) == []


def test_masks_follow_the_tokens_that_they_depend_on(desk: Desk) -> None:
    desk.start("r", "a(b|c)*")
    assert desk.plan().awaits_masks
    assert desk.take_letters() == [["a"]]
    assert desk.plan().awaits_masks, "the next step is planned before the token is known"
    assert desk.take_letters() == [], "and has no mask yet"
    desk.commit(token("a"))
    assert desk.take_letters() == [["0bc"]], "the end is allowed where the grammar may end"
    assert ends(desk.commit(EOS)) == [("r", FinishReason.STOP)]


def test_steps_in_flight_get_their_masks_in_order(desk: Desk) -> None:
    desk.start("r", "abc")
    desk.start("s", "xyz")
    desk.plan(), desk.plan()
    assert desk.take_letters() == [["a", "x"]]
    desk.commit(token("a"), token("x"))
    desk.plan()
    assert desk.take_letters() == [["b", "y"]]
    desk.commit(token("b"), token("y"))
    assert desk.take_letters() == [["c", "z"]]


def test_others_are_not_masked_and_do_not_wait(desk: Desk) -> None:
    desk.scheduler.submit(CLIENT, Submit("free", [1, 2], SamplingSpec(max_tokens=5, seed=0)))
    assert not desk.plan().awaits_masks
    desk.commit(9)
    desk.start("bound", "ab")
    plan = desk.plan()
    slots = {admitted.request_id: admitted.slot for admitted in plan.admitted}
    assert plan.awaits_masks
    assert [slot for slot, _, _ in desk.workers.supplied[0]] == [slots["bound"]]


def test_an_output_that_no_token_can_follow_ends_at_once(desk: Desk) -> None:
    desk.start("r", "ab", sampling={"min_tokens": 7, "eos_token_ids": ()})
    desk.plan(), desk.plan()
    assert ends(desk.commit(token("a"))) == []
    assert ends(desk.commit(token("b"))) == [("r", FinishReason.STOP)]
    assert not desk.scheduler.has_requests and not desk.scheduler.in_flight


def test_without_end_tokens_it_goes_on_while_it_can(desk: Desk) -> None:
    desk.start("r", "a{1,3}", sampling={"eos_token_ids": ()})
    for count in (1, 2):
        desk.plan()
        assert desk.take_letters() == [["a"]]
        assert ends(desk.commit(token("a"))) == [], count
    desk.plan()
    assert ends(desk.commit(token("a"))) == [("r", FinishReason.STOP)]


def test_an_output_complete_at_its_length_limit_finishes_with_stop(desk: Desk) -> None:
    desk.start("whole", "a", sampling={"max_tokens": 1})
    desk.start("cut", "a+", sampling={"max_tokens": 1})
    desk.plan()
    events = desk.commit(token("a"), token("a"))
    assert ends(events) == [("whole", FinishReason.STOP), ("cut", FinishReason.LENGTH)]


def test_stop_tokens_are_allowed_where_the_grammar_may_end_and_as_its_text(desk: Desk) -> None:
    desk.start("r", "ab?c?", sampling={"stop_token_ids": (STOP, token("b"))})
    desk.plan()
    assert desk.take_letters() == [["a"]]
    desk.commit(token("a"))
    desk.plan()
    assert desk.take_letters() == [["01bc"]]
    events = desk.commit(token("b"))
    assert events[-1] == (CLIENT, Finished("r", FinishReason.STOP, token("b")))


def test_an_aborted_request_leaves_no_step_waiting(desk: Desk) -> None:
    desk.start("r", "abc")
    desk.plan(), desk.plan()
    desk.take_letters()
    desk.scheduler.abort(CLIENT, ["r"])
    desk.commit(token("a"))
    assert desk.take_letters() == [[]], "the step in flight is told that there is no mask"
    desk.commit(token("z"))
    assert desk.take_letters() == []


def test_a_preempted_request_keeps_its_place(desk: Desk) -> None:
    desk.start("r", "abcd")
    desk.plan(), desk.plan()
    desk.commit(token("a"))
    (request,) = desk.scheduler.requests.values()
    desk.take_letters()
    desk.scheduler._table._leave_batch(request)
    request.move(type(request.state).WAITING)
    desk.scheduler.waiting.add(request)
    desk.commit(token("b"))
    desk.plan()
    assert desk.take_letters() == [["c"]]


def test_a_resumed_request_goes_on_where_it_was(desk: Desk) -> None:
    desk.start("r", "abcd", resume_output_token_ids=[token("a"), token("b")])
    desk.plan()
    assert desk.take_letters() == [["c"]]
    assert ends(desk.submit("over", "abcd", resume_output_token_ids=[token(letter) for letter in "abcd"])) == [
        ("over", FinishReason.STOP)
    ]
    assert ends(desk.submit("other", "abcd", resume_output_token_ids=[token("x")])) == [
        ("other", (FailureKind.INVALID, "structured_outputs.regex"))
    ]
    letters = [token(letter) for letter in "abcd"]
    sampling = {"max_tokens": 4}
    assert ends(desk.submit("limit", "abcd", sampling=sampling, resume_output_token_ids=letters)) == [
        ("limit", FinishReason.STOP)
    ]
    assert ends(desk.submit("cut", "abcde", sampling=sampling, resume_output_token_ids=letters) + desk.wait()) == [
        ("cut", FinishReason.LENGTH)
    ]


def test_a_token_that_has_no_place_ends_its_request(desk: Desk) -> None:
    desk.start("r", "ab")
    desk.start("s", "ab")
    desk.plan()
    events = desk.commit(token("x"), token("a"))
    assert ends(events) == [("r", (FailureKind.INVALID, "structured_outputs.regex"))]
    assert [key[1] for key in desk.scheduler.requests] == ["s"]
