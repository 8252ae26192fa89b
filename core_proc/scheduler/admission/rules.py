"""Which waiting request may start next: rules that delay one request, and limits that hold up the whole queue.

A delayed request lets those behind it pass. How many may pass is bounded: then it holds up the queue until it starts,
so nothing starves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.budget import PromptBudget
from octavo.core_proc.scheduler.delta import StepDraft
from octavo.core_proc.scheduler.policy import OrderedRequests
from octavo.core_proc.scheduler.waiting_queue import WaitingQueue
from octavo.protocol.ids import SlotId

WATERMARK = 0.01
"""Share of the blocks that admission leaves free for running requests to grow into."""

MAX_DELAYED = 64
"""Delayed requests that are passed over in one step. The cost of a step does not grow with the queue."""


class DelayRule(Protocol):
    """A feature's reason why one request must wait though there is room for it."""

    @property
    def max_bypass(self) -> int:
        """How many requests may start before one that this rule delays."""

    def reason_to_wait(self, request: Request) -> str:
        """Return the `waiting_reason` if the request may not start now, "" if it may. Changes nothing."""


Limit = Callable[[Request, StepDraft, PromptBudget], str]
"""Returns the `waiting_reason` if the step has no room for a request, "" if it has. Whoever is behind it waits too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The first waiting request that no rule delays."""

    request: Request | None
    """None: there is none."""
    reason: str
    """Why the first request of the queue is delayed, "" if it is not."""
    delayed: Sequence[Request]
    """The requests before it in the queue."""

    def count_bypass(self) -> None:
        """Count that the candidate starts before the requests ahead of it in the queue."""
        for request in self.delayed:
            request.num_bypassed += 1


class AdmissionRules:
    """The rules of one scheduler.

    Args:
        limits: checked in order; the first one reached decides.
    """

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._limits = limits
        self._delays: list[DelayRule] = []

    def add(self, rule: DelayRule) -> None:
        """Register a feature's rule."""
        self._delays.append(rule)

    def candidate(self, queue: WaitingQueue) -> Candidate:
        """Return the request of a queue that is to start next if the step has room for it."""
        request = queue.first
        if not self._delays or request is None:
            return Candidate(request, "", ())
        delayed: list[Request] = []
        first_reason = ""
        while request is not None and len(delayed) < MAX_DELAYED:
            max_bypass, reason = self._delay(request)
            if not reason:
                return Candidate(request, first_reason, delayed)
            first_reason = first_reason or reason
            if request.num_bypassed >= max_bypass:
                break
            delayed.append(request)
            request = queue.after(request)
        return Candidate(None, first_reason, delayed)

    def limit_reached(self, request: Request, draft: StepDraft, prompts: PromptBudget) -> str:
        """Return why the step has no room for a request, "" if it has."""
        for limit in self._limits:
            if reason := limit(request, draft, prompts):
                return reason
        return ""

    def _delay(self, request: Request) -> tuple[int, str]:
        for rule in self._delays:
            if reason := rule.reason_to_wait(request):
                return rule.max_bypass, reason
        return 0, ""


class EngineLimits:
    """The resources that every engine has a limited number of: slots, tokens of a step, blocks.

    Args:
        free_slots: of the batch; only read.
        running: every running request; only read.
        cache: where the blocks are.
    """

    def __init__(self, free_slots: Sequence[SlotId], running: OrderedRequests[Request], cache: PrefixCache) -> None:
        self._free_slots = free_slots
        self._running = running
        self._cache = cache
        self._watermark = max(1, int(cache.pool.num_blocks * WATERMARK)) if cache.pool.num_blocks else 0

    @property
    def in_order(self) -> list[Limit]:
        """The limits, the cheapest first."""
        return [self._preemption, self._step_in_flight, self._slots, self._states, self._tokens, self._blocks]

    def _preemption(self, request: Request, draft: StepDraft, prompts: PromptBudget) -> str:
        """What a preemption has freed is for the requests that still run."""
        return "blocks" if draft.has_preempted else ""

    def _step_in_flight(self, request: Request, draft: StepDraft, prompts: PromptBudget) -> str:
        """A preempted request starts again when all its tokens are known."""
        return "in_flight" if request.num_in_flight else ""

    def _slots(self, request: Request, draft: StepDraft, prompts: PromptBudget) -> str:
        return "" if self._free_slots else "max_num_seqs"

    def _states(self, request: Request, draft: StepDraft, prompts: PromptBudget) -> str:
        states = self._cache.states
        return "states" if states is not None and len(self._running) >= states.max_requests else ""

    def _tokens(self, request: Request, draft: StepDraft, prompts: PromptBudget) -> str:
        num_hits = self._cache.count_hits(request)[0].num_blocks
        num_uncomputed = request.num_uncomputed_tokens - num_hits * self._cache.block_size
        return "" if prompts.has_room(num_uncomputed) else "budget"

    def _blocks(self, request: Request, draft: StepDraft, prompts: PromptBudget) -> str:
        num_blocks = self._cache.num_blocks_to_start(request)
        if self._running.first:
            num_blocks += self._watermark
        return "blocks" if num_blocks > draft.num_spare_blocks else ""
