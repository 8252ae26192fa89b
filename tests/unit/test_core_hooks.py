"""Step hooks: called in order, each with the previous one's result."""

from core_fakes import FakeEngine

from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.hooks import SchedulerHooks
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.frontend.generation.limits import MAX_VOLUME
from octavo.protocol.config import EngineConfig, ModelConfig
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason


class Hook:
    """Notes its calls, and replaces one reason to finish by another."""

    def __init__(self, name: str, calls: list[str], reason: FinishReason, answer: FinishReason) -> None:
        self._name = name
        self._calls = calls
        self._reason = reason
        self._answer = answer

    @property
    def wake_fds(self) -> list[int]:
        return [len(self._name)]

    def on_step(self) -> list[ClientEvent]:
        self._calls.append(self._name)
        return [(b"client", Failed(self._name, FailureKind.INTERNAL, ""))]

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        self._calls.append(f"{self._name} {request.request_id}")
        return FinishCause(self._answer) if cause.reason is self._reason else cause


def test_hooks_are_called_in_order_and_each_has_the_last_word_before_the_next():
    engine, calls = FakeEngine(), list[str]()
    hooks = engine.scheduler.hooks
    hooks.add(Hook("a", calls, FinishReason.LENGTH, FinishReason.REPETITION))
    hooks.add(Hook("bb", calls, FinishReason.REPETITION, FinishReason.STOP))
    assert hooks.wake_fds == [1, 2]
    assert [event.request_id for _, event in hooks.on_step()] == ["a", "bb"]
    output = engine.submit("r", [1, 2, 3], max_tokens=2)
    engine.run()
    assert calls == ["a", "bb", "a r", "bb r"], "they are asked once, when a limit ends the request"
    assert isinstance(output.end, Finished) and output.end.reason is FinishReason.STOP


def test_without_hooks_nothing_changes():
    hooks = SchedulerHooks()
    assert (hooks.wake_fds, hooks.on_step()) == ([], [])


def test_the_queue_is_bounded_in_tokens_and_takes_the_largest_call():
    """A call with many sequences is queued at once: an empty queue must have room for it."""
    assert EngineConfig(model=ModelConfig(model="m")).scheduler.max_num_queued_tokens >= MAX_VOLUME
