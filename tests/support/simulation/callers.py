"""Simulated callers: each checks its answer against the oracle when the request ends."""

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.frontend.request_stream import RequestStream
from octavo.protocol.config import CachePlan
from octavo.protocol.errors import (
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    RequestFailedError,
)
from octavo.protocol.events import Finished, TokenLogprobs, Tokens
from octavo.protocol.ids import RequestId
from simulation.oracle import Answer, answer, rejection
from simulation.scenario import POISON_MARKS, VOCAB_SIZE, Ask

MIN_DEATHS = 2
"""If so many processes died for other reasons while a request was in flight alone, it may be considered guilty."""


class WrongAnswer(AssertionError):
    """A request got a wrong answer, or did not end exactly once."""


def require(condition: bool, name: RequestId, message: str) -> None:
    """Report a wrong answer unless the condition holds."""
    if not condition:
        raise WrongAnswer(f"request {name}: {message}")


@dataclass
class Caller:
    """A caller that waits for an answer, and what it has received."""

    ask: Ask
    plan: CachePlan
    """The engine's cache plan; decides which requests must be rejected."""
    on_change: Callable[["Caller"], None]
    """Called after every received event."""
    stream: RequestStream | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    end: Finished | OctavoError | None = None
    has_left: bool = False
    num_rejections: int = 0
    num_deaths: int = 0
    """Deaths of cores and workers that no request caused, since this request was submitted."""

    @property
    def name(self) -> RequestId:
        """Id of the request."""
        return self.ask.submit.request_id

    @property
    def is_waiting(self) -> bool:
        """True until it has ended, or the caller has left."""
        return self.end is None and not self.has_left

    @property
    def is_poisoned(self) -> bool:
        """True if it crashes the core or its workers."""
        return any(mark in self.name for mark in POISON_MARKS)

    @property
    def is_blamed(self) -> bool:
        """True when the engine has failed it as a request that crashes processes."""
        return isinstance(self.end, RequestFailedError)

    def set(self) -> None:
        """Handle a received event."""
        assert self.stream is not None
        try:
            while events := self.stream.take():
                for event in events:
                    self._take(event)
        except OctavoError as error:
            self._fail(error)
        self.on_change(self)

    def _take(self, event: Tokens | Finished) -> None:
        require(self.is_waiting, self.name, f"{event} after the end")
        num_prompt = len(self.ask.submit.prompt_token_ids)
        require(0 <= event.num_cached_tokens < num_prompt, self.name, f"{event.num_cached_tokens} cached tokens")
        if isinstance(event, Finished):
            self.end = event
            require(rejection(self.ask.submit, self.plan) is None, self.name, f"{event}, but it should be rejected")
            self._check_answer(event, answer(self.ask.submit, VOCAB_SIZE, self.plan.max_model_len))
            return
        require(bool(event.token_ids), self.name, "a message without tokens")
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or []
        if event.prompt_logprobs is not None:
            require(self.prompt_logprobs is None, self.name, "prompt logprobs came twice")
            self.prompt_logprobs = event.prompt_logprobs

    def _fail(self, error: OctavoError) -> None:
        """Accept a failure if the simulation gave a reason for it."""
        require(self.is_waiting, self.name, f"{error} after the end")
        is_right = True
        match error:
            case OverloadedError():
                is_right = not self.token_ids
                self.num_rejections += 1
            case InvalidRequestError():
                is_right = rejection(self.ask.submit, self.plan) is not None
            case RequestFailedError():
                is_right = self.is_poisoned or self.num_deaths >= MIN_DEATHS
            case EngineDeadError():
                pass  # only an engine that is shutting down sends this, and the run knows whether it is
        require(is_right, self.name, f"failed without a reason: {error}")
        self.end = error

    def _check_answer(self, end: Finished, expected: Answer) -> None:
        """Require that the answer equals the oracle's."""
        name = self.name
        require(self.token_ids == expected.token_ids, name, f"{self.token_ids} where {expected.token_ids} is right")
        require(self.logprobs == expected.logprobs, name, f"{self.logprobs} where {expected.logprobs} is right")
        require(self.prompt_logprobs == expected.prompt_logprobs, name, "prompt logprobs differ")
        require(end.result == expected.vector, name, f"{end.result} where {expected.vector} is right")
        told, right = (end.reason, end.stop_token_id), (expected.reason, expected.stop_token_id)
        require(told == right, name, f"ended by {told} where {right} is right")
