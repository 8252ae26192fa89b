"""Compilation of grammars: once each, in a sandbox, cheap ones first, frontends in turn."""

import select
import signal
import threading
import time

import pytest
from core_fakes import CLIENT, VOCAB_SIZE
from grammar_desk import VOCABULARY, Desk, ends, token

from octavo.core_proc.grammar import compiler as compiler_module
from octavo.core_proc.grammar import grammars as grammars_module
from octavo.core_proc.grammar import sandbox as sandbox_module
from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.constraint import Constraint
from octavo.core_proc.grammar.sandbox import CompilerSandbox, CpuBudgetExceeded, GrammarRejected, SandboxKilled
from octavo.protocol.events import FailureKind
from octavo.protocol.ids import pack_ids
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.steps import StepFault, StepResult


def test_compiled_grammars_are_kept_up_to_a_number(
    desk: Desk, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    for text in ("one", "two", "three"):
        desk.start(text, text)
    assert desk.submit("again", "three") == [] and desk.grammars.num_waiting == 0
    desk.start("first again", "one")
    assert compiled == ["one", "two", "three", "one"]


def test_a_sandbox_ends_by_its_limit_and_the_next_is_served() -> None:
    sandbox = CompilerSandbox(cpu_limit_s=1)
    try:
        with pytest.raises(GrammarRejected, match="more than 1 s"):
            sandbox.check('start: %json {"type": "integer", "multipleOf": 9999999}')
        sandbox.check('start: "a"')
        with pytest.raises(GrammarRejected, match="no start rule"):
            sandbox.check('begin: "a"')
    finally:
        sandbox.close()


def test_a_sandbox_that_crashes_says_so() -> None:
    sandbox = CompilerSandbox(cpu_limit_s=5)
    try:
        sandbox.check('start: "a"')
        assert sandbox._child is not None
        sandbox._child.send_signal(signal.SIGABRT)
        with pytest.raises(GrammarRejected, match="crashes"):
            sandbox.check('start: "a"')
        sandbox.check('start: "a"')
    finally:
        sandbox.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sandbox_that_is_killed_or_stopped_from_outside_is_restarted(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller is told of faults of the grammar, not of accidents."""
    sandbox = CompilerSandbox(cpu_limit_s=1)
    try:
        sandbox.check('start: "a"')
        assert sandbox._child is not None
        sandbox._child.send_signal(number)
        if number is signal.SIGSTOP:
            monkeypatch.setattr(sandbox_module, "WALL_PER_CPU", 1)
        with pytest.raises(GrammarRejected, match="no start rule"):
            sandbox.check('begin: "a"')
    finally:
        sandbox.close()


def test_a_sandbox_that_is_killed_each_time_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = CompilerSandbox(cpu_limit_s=5)
    warm_up = sandbox.warm_up

    def start_and_kill() -> None:
        warm_up()
        assert sandbox._child is not None
        sandbox._child.kill()

    monkeypatch.setattr(sandbox, "warm_up", start_and_kill)
    try:
        with pytest.raises(SandboxKilled):
            sandbox.check('start: "a"')
    finally:
        sandbox.close()


def test_grammars_that_no_request_waits_for_are_not_compiled(
    desk: Desk, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, release = threading.Semaphore(0), threading.Event()
    check = CompilerSandbox.check

    def slow(self: CompilerSandbox, source: str, cpu_budget_s: float | None) -> None:
        if "hold" in source:
            held.release()
            assert release.wait(30)
        check(self, source, cpu_budget_s)

    monkeypatch.setattr(CompilerSandbox, "check", slow)
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


def test_a_step_does_not_look_at_requests_that_wait(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(compiler, max_num_seqs=1)
    for index in range(20):
        desk.start(str(index), "[ab]*")
    looked_at: list[str] = []
    is_behind = Constraint.is_behind.fget

    def noted(self: Constraint) -> bool:
        looked_at.append(self.request.request_id)
        return is_behind(self)

    monkeypatch.setattr(Constraint, "is_behind", property(noted))
    desk.plan()
    desk.commit(token("a"))
    assert set(looked_at) == {"0"}
    desk.scheduler.abort(CLIENT, ["0"])
    looked_at.clear()
    desk.plan()
    desk.commit(token("b"))
    assert set(looked_at) == {"1"}
    desk.grammars.abort(CLIENT, [str(index) for index in range(20)])
    desk.scheduler.abort(CLIENT, [str(index) for index in range(20)])
    desk.grammars.on_step()
    assert not desk.grammars._constraints and not desk.grammars._active


def test_a_request_rejected_in_the_middle_of_its_prompt_leaves_nothing(compiler: GrammarCompiler) -> None:
    desk = Desk(compiler, max_num_batched_tokens=2, max_num_seqs=2)
    desk.start("a", "[ab]*")
    plan = desk.plan()
    [scheduled] = plan.scheduled
    assert not scheduled.num_samples, "the step must end inside the prompt"
    fault = StepFault(scheduled.slot, "extra_args: wrong", "extra_args")
    events = desk.scheduler.commit(StepResult(plan.sequence, pack_ids(), [], [], faults=[fault]))
    assert ends(events + desk.grammars.on_step()) == [("a", (FailureKind.INVALID, "extra_args"))]
    assert not desk.grammars._constraints and not desk.grammars._active


def test_a_sandbox_gives_up_at_its_budget_before_its_limit() -> None:
    sandbox = CompilerSandbox(cpu_limit_s=60)
    try:
        sandbox.check('start: "a"')  # its start uses processor time too
        with pytest.raises(CpuBudgetExceeded):
            sandbox.check('start: %json {"type": "integer", "multipleOf": 9999999}', 0.05)
        sandbox.check('start: "a"', 60.0)
    finally:
        sandbox.close()


def test_cheap_grammars_pass_costly_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def check(self: CompilerSandbox, source: str, cpu_budget_s: float | None) -> float:
        if "costly" in source:
            if cpu_budget_s is not None:
                raise CpuBudgetExceeded
            assert release.wait(30)
            raise GrammarRejected("the grammar needs more than 1 s of processor time")
        return 0.0

    monkeypatch.setattr(CompilerSandbox, "check", check)
    monkeypatch.setattr(CompilerSandbox, "warm_up", lambda self: None)
    desk = Desk(GrammarCompiler(timeout_s=1))
    desk.grammars.set_vocabulary(VOCABULARY)
    for index in range(5):
        desk.submit(f"costly {index}", f"costly {index}")
    desk.submit("cheap", "cheap(er)?")
    desk.grammars.abort(CLIENT, ["costly 3", "costly 4"])
    while desk.grammars.is_waiting((CLIENT, "cheap")):
        assert select.select(desk.grammars.wake_fds, [], [], 30)[0]
        assert ends(desk.grammars.take_ready()) == []
    assert [name for _, name in desk.scheduler.requests] == ["cheap"]
    desk.grammars.abort(CLIENT, ["costly 1", "costly 2"])
    release.set()
    assert ends(desk.wait()) == [("costly 0", (FailureKind.INVALID, "structured_outputs.regex"))]
    desk.compiler.close()


def test_costly_grammars_of_several_frontends_take_turns(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    begun, release = threading.Semaphore(0), threading.Event()

    def costly(self: CompilerSandbox, source: str, cpu_budget_s: float | None) -> float:
        if cpu_budget_s is not None:
            begun.release()
            raise CpuBudgetExceeded
        served.append(source.partition("/")[2][:2])
        assert release.wait(30)
        return 0.0

    monkeypatch.setattr(CompilerSandbox, "check", costly)
    monkeypatch.setattr(CompilerSandbox, "warm_up", lambda self: None)
    monkeypatch.setattr(compiler_module, "NUM_QUICK_THREADS", 1)
    desk = Desk(GrammarCompiler(timeout_s=5))
    desk.grammars.set_vocabulary(VOCABULARY)
    for client, name in [(b"a", "a0"), (b"a", "a1"), (b"a", "a2"), (b"a", "a3"), (b"b", "b0"), (b"b", "a3")]:
        desk.submit(name, name, client=client)
    for _ in range(5):
        assert begun.acquire(timeout=30)
    for _ in range(3000):  # until the last one has come from one queue to the other
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
    def broken(self: CompilerSandbox, source: str, cpu_budget_s: float | None) -> None:
        if "unlucky" in source:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(CompilerSandbox, "check", broken)
    desk = Desk(GrammarCompiler(timeout_s=5))
    desk.grammars.set_vocabulary(VOCABULARY)
    names = ["r", "s", "t", "u", "v"]  # more than there are threads
    for name in names:
        desk.submit(name, f"unlucky {name}")
    desk.submit("others", "lucky")
    failure = (FailureKind.INTERNAL, "structured_outputs.regex")
    assert sorted(ends(desk.wait())) == [(name, failure) for name in names]
    assert [name for _, name in desk.scheduler.requests] == ["others"]
    assert caplog.messages.count("the grammar compiler has failed; the request gets an internal error") == len(names)
    desk.compiler.close()


def test_a_vocabulary_of_another_model_is_ignored() -> None:
    desk = Desk(GrammarCompiler(timeout_s=5))
    desk.grammars.set_vocabulary(ModelVocabulary([b"a"], []))
    assert desk.compiler.vocabulary is None
    desk.grammars.set_vocabulary(VOCABULARY)
    desk.grammars.set_vocabulary(ModelVocabulary([b"x"] * VOCAB_SIZE, []))
    assert desk.compiler.vocabulary is VOCABULARY
    desk.compiler.close()
