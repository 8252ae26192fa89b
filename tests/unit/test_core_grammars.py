"""Requests with grammars in the core: how they wait, what is refused, which masks follow which steps."""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from core_fakes import CLIENT, VOCAB_SIZE, cache_plan, core_config

from octavo.core_proc.grammar import compiler as compiler_module
from octavo.core_proc.grammar import grammars as grammars_module
from octavo.core_proc.grammar import trial as trial_module
from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.grammar.trial import Trial, TrialFailed, TrialKilled, TrialUnfinished
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, Tokens
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit, Vocabulary
from octavo.protocol.steps import SlotMask, StepPlan, StepResult
from octavo.protocol.structured import GrammarKind, GrammarPart, GrammarSpec

EOS, STOP = 0, 1
TOKENS = [b"<e>", b"<s>", *[bytes([97 + index]) for index in range(26)]]
VOCABULARY = Vocabulary([*TOKENS, *[b""] * (VOCAB_SIZE - len(TOKENS))], [EOS, STOP])


def token(letter: str) -> int:
    return TOKENS.index(letter.encode())


def letters(mask: bytes) -> str:
    """The tokens that a mask allows; the two special ones as digits."""
    names = ["0", "1", *"abcdefghijklmnopqrstuvwxyz"]
    bits = int.from_bytes(mask, "little")
    assert len(mask) == 8 and bits < 1 << VOCAB_SIZE
    return "".join(name for index, name in enumerate(names) if bits >> index & 1)


class FakeWorkers:
    """Keeps the masks of each step that awaited some."""

    def __init__(self) -> None:
        self.supplied: list[list[SlotMask]] = []

    def supply(self, masks: list[SlotMask]) -> None:
        self.supplied.append(masks)


class Desk:
    """A scheduler, its grammars, and the part of the step loop between them."""

    def __init__(self, compiler: GrammarCompiler, **changes: Any) -> None:
        config = core_config(**changes)
        self.scheduler = Scheduler(config, cache_plan(config), clock=lambda: 0.0)
        self.workers = FakeWorkers()
        self.grammars = Grammars(self.scheduler, self.workers, compiler)
        self.compiler = compiler
        self.plans: list[StepPlan] = []

    def submit(
        self, name: str, text: str, kind: GrammarKind = GrammarKind.REGEX, client: bytes = CLIENT, **fields: Any
    ) -> list[ClientEvent]:
        settings = {"max_tokens": 9, "seed": 0, "eos_token_ids": (EOS,), **fields.pop("sampling", {})}
        marker, parts = fields.pop("start_after", b""), fields.pop("parts", ())
        spec = GrammarSpec(kind, text, "structured_outputs.regex", marker, parts)
        submit = Submit(name, [5, 6, 7], SamplingSpec(**settings), grammar=spec, **fields)
        return self.grammars.submit(client, submit)

    def wait(self) -> list[ClientEvent]:
        """Wait until nothing is being compiled."""
        events: list[ClientEvent] = []
        while self.grammars.has_requests:
            assert select.select([self.grammars.wake_fd], [], [], 30)[0], "the compiler never said that it is done"
            events += self.grammars.take_ready()
        return events

    def start(self, name: str, text: str, **fields: Any) -> None:
        assert self.submit(name, text, **fields) + self.wait() == []

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.plans.append(plan)
        assert self.grammars.settle() == []
        return plan

    def commit(self, *sampled: int) -> list[ClientEvent]:
        plan = self.plans.pop(0)
        events = self.scheduler.commit(StepResult(plan.sequence, list(sampled), [], []))
        return events + self.grammars.settle()

    def take_letters(self) -> list[list[str]]:
        """The masks supplied since the last call."""
        supplied, self.workers.supplied = self.workers.supplied, []
        return [[letters(mask) for _, mask in masks] for masks in supplied]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(timeout_s=5)
    compiler.learn(VOCABULARY)
    yield compiler
    compiler.close()


@pytest.fixture
def desk(compiler: GrammarCompiler) -> Desk:
    return Desk(compiler)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the grammars that are compiled during the test."""
    texts: list[str] = []
    compile_ = GrammarCompiler._compile

    def noted(self: GrammarCompiler, trial: Trial, key: Any, patience_s: float | None) -> Any:
        texts.append(key[1])
        return compile_(self, trial, key, patience_s)

    monkeypatch.setattr(GrammarCompiler, "_compile", noted)
    return texts


def ends(events: list[ClientEvent]) -> list[Any]:
    """What ended, and how."""
    return [
        (event.request_id, event.reason if isinstance(event, Finished) else (event.kind, event.param))
        for _, event in events
        if not isinstance(event, Tokens)
    ]


def test_a_request_waits_for_its_grammar_outside_of_the_scheduler(desk: Desk) -> None:
    assert desk.submit("r", "wait(a|b)") == []
    assert desk.grammars.has_requests and desk.grammars.waiting_keys == [(CLIENT, "r")]
    assert not desk.scheduler.has_requests
    assert desk.wait() == []
    assert desk.scheduler.has_requests and not desk.grammars.has_requests


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
    desk.grammars.learn(VOCABULARY)
    named = tuple(GrammarPart(name, text) for name, text in zip(["first", "second", "third"], parts, strict=False))
    desk.submit("r", f'{{"anyOf":[{",".join(whole)}]}}', kind=GrammarKind.JSON_SCHEMA, parts=named)
    ((_, failed),) = desk.wait()
    assert isinstance(failed, Failed) and failed.kind is FailureKind.INVALID
    assert failed.param == param
    assert words in failed.message
    desk.compiler.close()


def test_after_the_time_of_one_grammar_no_further_part_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def slow(self: Trial, source: str, patience_s: float | None) -> float:
        tried.append(source)
        if len(tried) == 1:
            raise TrialFailed("the whole of it")
        return 0.6

    monkeypatch.setattr(Trial, "check", slow)
    compiler = GrammarCompiler(timeout_s=1)
    parts = tuple(str(number) for number in range(5))
    monkeypatch.setattr(Trial, "warm_up", lambda self: None)
    result = compiler._compile(Trial(1), (GrammarKind.JSON_SCHEMA, "{}", parts), None)
    assert (result.message, result.part, len(tried)) == ("the whole of it", None, 3)
    tried.clear()
    with pytest.raises(TrialUnfinished):
        compiler._compile(Trial(1), (GrammarKind.JSON_SCHEMA, "{}", parts), 1.0)
    assert len(tried) == 3, "many parts are costly together"
    os.close(compiler.wake_fd)


def test_what_is_refused_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    untaught = Desk(GrammarCompiler(timeout_s=5))
    assert ends(untaught.submit("r", "a")) == [("r", (FailureKind.INVALID, "structured_outputs.regex"))]
    os.close(untaught.compiler.wake_fd)
    narrow = Desk(desk.compiler, max_grammar_bytes=10)
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
    assert [slot for slot, _ in desk.workers.supplied[0]] == [slots["bound"]]


def test_nothing_can_follow_so_it_ends_at_once(desk: Desk) -> None:
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


def test_what_is_complete_at_its_limit_has_stopped(desk: Desk) -> None:
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
    desk.scheduler._leave_batch(request)
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


def test_the_grammar_begins_after_the_mark(desk: Desk) -> None:
    desk.start("r", "xy", start_after=b"end")
    for letter in "zend":
        desk.plan()
        assert desk.take_letters() == [["1abcdefghijklmnopqrstuvwxyz"]], "what comes before is free, but for the end"
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
def test_what_is_free_too_long_is_ended_by_force(desk: Desk, before: str) -> None:
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


def test_a_mark_that_no_tokens_make_is_refused(desk: Desk) -> None:
    for marker in ((), (token("e"),), (999,)):
        spec = GrammarSpec(GrammarKind.FREE, "", "p", b"end", (), 1, marker)
        submit = Submit("r", [5], SamplingSpec(max_tokens=3, seed=0), grammar=spec)
        assert ends(desk.grammars.submit(CLIENT, submit)) == [("r", (FailureKind.INVALID, "p"))]


def test_without_end_tokens_what_comes_before_the_grammar_needs_no_mask(desk: Desk) -> None:
    desk.start("r", "xy", start_after=b"end", sampling={"eos_token_ids": (), "stop_token_ids": (STOP,)})
    desk.plan()
    assert desk.take_letters() == [[]]


def test_the_mark_is_found_over_tokens_and_within_one(compiler: GrammarCompiler) -> None:
    tokens = [b"a", b"<", b"/t", b"h>", b"a</th>b", b"x"]
    own = GrammarCompiler(timeout_s=5)
    own.learn(Vocabulary([*tokens, *[b""] * (VOCAB_SIZE - len(tokens))], []))
    for outputs in ([1, 2, 3], [0, 1, 1, 2, 3], [4]):
        desk = Desk(own)
        desk.start("r", "xa", start_after=b"</th>", resume_output_token_ids=outputs)
        desk.plan()
        ((_, mask),) = desk.workers.supplied[0]
        assert int.from_bytes(mask, "little") == 1 << 5
    own.close()


def test_compiled_grammars_are_kept_up_to_a_number(
    desk: Desk, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    for text in ("one", "two", "three"):
        desk.start(text, text)
    assert desk.submit("again", "three") == [] and not desk.grammars.has_requests
    desk.start("first again", "one")
    assert compiled == ["one", "two", "three", "one"]


def test_a_trial_ends_by_its_limit_and_the_next_is_served() -> None:
    trial = Trial(cpu_limit_s=1)
    try:
        with pytest.raises(TrialFailed, match="more than 1 s"):
            trial.check('start: %json {"type": "integer", "multipleOf": 9999999}')
        trial.check('start: "a"')
        with pytest.raises(TrialFailed, match="no start rule"):
            trial.check('begin: "a"')
    finally:
        trial.close()


def test_a_trial_that_crashes_says_so() -> None:
    trial = Trial(cpu_limit_s=5)
    try:
        trial.check('start: "a"')
        assert trial._child is not None
        trial._child.send_signal(signal.SIGABRT)
        with pytest.raises(TrialFailed, match="crashes"):
            trial.check('start: "a"')
        trial.check('start: "a"')
    finally:
        trial.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trial_that_somebody_kills_or_stops_is_repeated(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller is told of faults of the grammar, not of accidents."""
    trial = Trial(cpu_limit_s=5)
    try:
        trial.check('start: "a"')
        assert trial._child is not None
        trial._child.send_signal(number)
        if number is signal.SIGSTOP:
            monkeypatch.setattr(trial_module, "WALL_PER_CPU", 1)
        with pytest.raises(TrialFailed, match="no start rule"):
            trial.check('begin: "a"')
    finally:
        trial.close()


def test_a_trial_that_is_killed_each_time_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(cpu_limit_s=5)
    warm_up = trial.warm_up

    def start_and_kill() -> None:
        warm_up()
        assert trial._child is not None
        trial._child.kill()

    monkeypatch.setattr(trial, "warm_up", start_and_kill)
    try:
        with pytest.raises(TrialKilled):
            trial.check('start: "a"')
    finally:
        trial.close()


def test_what_nobody_waits_for_is_not_compiled(
    desk: Desk, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, release = threading.Semaphore(0), threading.Event()
    check = Trial.check

    def slow(self: Trial, source: str, patience_s: float | None) -> None:
        if "hold" in source:
            held.release()
            assert release.wait(30)
        check(self, source, patience_s)

    monkeypatch.setattr(Trial, "check", slow)
    for index in range(compiler_module.NUM_QUICK_THREADS):
        desk.submit(f"hold {index}", f"hold{index}")
    for _ in range(compiler_module.NUM_QUICK_THREADS):
        assert held.acquire(timeout=30), "every thread is busy"
    desk.submit("left", "left alone")
    desk.submit("shared", "shared")
    desk.submit("stays", "shared")
    desk.grammars.abort(CLIENT, ["left", "shared"])
    release.set()
    assert desk.wait() == []
    assert "left alone" not in compiled and compiled.count("shared") == 1
    assert "stays" in [name for _, name in desk.scheduler.requests]


def test_cheap_grammars_pass_costly_ones() -> None:
    desk = Desk(GrammarCompiler(timeout_s=1))
    desk.grammars.learn(VOCABULARY)
    for index in range(5):
        text = f'{{"type": "integer", "multipleOf": 9999999, "title": "{index}"}}'
        desk.submit(f"costly {index}", text, kind=GrammarKind.JSON_SCHEMA)
    desk.submit("cheap", "cheap(er)?")
    desk.grammars.abort(CLIENT, ["costly 3", "costly 4"])
    while desk.grammars.waiting_keys[-1] == (CLIENT, "cheap"):
        assert select.select([desk.grammars.wake_fd], [], [], 30)[0]
        assert ends(desk.grammars.take_ready()) == [], "no costly one has come to its end before"
    assert [name for _, name in desk.scheduler.requests] == ["cheap"]
    desk.grammars.abort(CLIENT, ["costly 1", "costly 2"])
    assert ends(desk.wait()) == [("costly 0", (FailureKind.INVALID, "structured_outputs.regex"))]
    desk.compiler.close()


def test_costly_grammars_of_several_frontends_take_turns(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    begun, release = threading.Semaphore(0), threading.Event()

    def costly(self: Trial, source: str, patience_s: float | None) -> float:
        if patience_s is not None:
            begun.release()
            raise TrialUnfinished
        served.append(source.partition("/")[2][:2])
        assert release.wait(30)
        return 0.0

    monkeypatch.setattr(Trial, "check", costly)
    monkeypatch.setattr(Trial, "warm_up", lambda self: None)
    monkeypatch.setattr(compiler_module, "NUM_QUICK_THREADS", 1)
    desk = Desk(GrammarCompiler(timeout_s=5))
    desk.grammars.learn(VOCABULARY)
    for client, name in [(b"a", "a0"), (b"a", "a1"), (b"a", "a2"), (b"a", "a3"), (b"b", "b0"), (b"b", "a3")]:
        desk.submit(name, name, client=client)
    for _ in range(5):
        assert begun.acquire(timeout=30)
    for _ in range(3000):  # until the last one has come from one lane to the other
        if sum(map(len, desk.compiler._costly._lines.values())) == 5:
            break
        time.sleep(0.01)
    release.set()
    assert desk.wait() == []
    assert served == ["a0", "b0", "a1", "a3", "a2"]
    desk.compiler.close()


def test_a_frontend_with_many_requests_leaves_room_for_others(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_WAITING", 4)
    for index in range(4):
        assert desk.submit(f"r{index}", f"room{index}", client=b"a") == []
    overloaded = (FailureKind.OVERLOADED, None)
    assert ends(desk.submit("late", "late", client=b"a")) == [("late", overloaded)]
    assert desk.submit("s0", "room", client=b"b") == desk.submit("s1", "room", client=b"b") == []
    assert ends(desk.submit("s2", "room", client=b"b")) == [("s2", overloaded)]
    assert desk.submit("t", "room", client=b"c") == []
    assert desk.wait() == []


def test_a_compiler_that_fails_is_no_fault_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Trial, source: str, patience_s: float | None) -> None:
        if "unlucky" in source:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(Trial, "check", broken)
    desk = Desk(GrammarCompiler(timeout_s=5))
    desk.grammars.learn(VOCABULARY)
    names = ["r", "s", "t", "u", "v"]  # more than there are threads
    for name in names:
        desk.submit(name, f"unlucky {name}")
    desk.submit("others", "lucky")
    failure = (FailureKind.INTERNAL, "structured_outputs.regex")
    assert sorted(ends(desk.wait())) == [(name, failure) for name in names]
    assert [name for _, name in desk.scheduler.requests] == ["others"]
    assert caplog.messages.count("the compiler of grammars has failed") == len(names)
    desk.compiler.close()


def test_a_vocabulary_of_another_model_is_ignored() -> None:
    desk = Desk(GrammarCompiler(timeout_s=5))
    desk.grammars.learn(Vocabulary([b"a"], []))
    assert desk.compiler.vocabulary is None
    desk.grammars.learn(VOCABULARY)
    desk.grammars.learn(Vocabulary([b"x"] * VOCAB_SIZE, []))
    assert desk.compiler.vocabulary is VOCABULARY
    desk.compiler.close()
