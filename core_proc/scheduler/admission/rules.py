"""Which waiting request may start next: adapters delay only their own requests, limits delay the whole queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.encoder_schedule import EncoderSchedule
from octavo.core_proc.queued_request import LiveRequest
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.adapter_slots import AdapterSlots
from octavo.core_proc.scheduler.budget import PromptBudget
from octavo.core_proc.scheduler.delta import StepBuilder
from octavo.core_proc.scheduler.policy import OrderedRequests
from octavo.core_proc.scheduler.waiting_queue import WaitingQueue
from octavo.protocol.ids import SlotId

WATERMARK = 0.01
"""Fraction of the blocks that admission leaves free for running requests to grow into."""

Limit = Callable[[Request, StepBuilder, PromptBudget], str]
"""Returns the `waiting_reason` if the step has no room for a request, otherwise "". All requests behind it wait too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The waiting request that should start next."""

    request: Request | None
    """None if no request may start."""
    delayed: LiveRequest | None = None
    """The first earlier request in the queue that finds no adapter slot."""

    @property
    def reason(self) -> str:
        """Why the first request of the queue is delayed. Empty if it is not."""
        return "adapter" if self.delayed else ""


class AdmissionRules:
    """The admission rules of one scheduler.

    Args:
        limits: the engine's limits. The first one reached decides.
        adapters: adapter slots. Requests wait if their adapter has none.
    """

    def __init__(self, limits: "EngineLimits", adapters: AdapterSlots) -> None:
        self._limits = limits.in_order
        self._adapters = adapters

    def candidate(self, queue: WaitingQueue) -> Candidate:
        """Return the request of a queue that should start next if the step has room for it. Changes nothing."""
        if not self._adapters.num_slots:
            return Candidate(queue.first)
        chosen, delayed = self._adapters.choose(queue.heads())
        return Candidate(None if chosen is None else queue.unpacked(chosen), delayed)

    def limit_reached(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        """Return why the step has no room for a request. Empty if it has."""
        for limit in self._limits:
            if reason := limit(request, builder, prompts):
                return reason
        return ""


class EngineLimits:
    """The limited resources of every engine: slots, tokens of a step, blocks.

    Args:
        free_slots: free slots of the batch; read-only.
        running: all running requests; read-only.
        cache: holds the blocks.
        encoder: keeps the encoder output that requests attend to. None if the model reads only tokens.
    """

    def __init__(
        self,
        free_slots: Sequence[SlotId],
        running: OrderedRequests[Request],
        cache: PrefixCache,
        encoder: EncoderSchedule | None = None,
    ) -> None:
        self._encoder = encoder
        self._free_slots = free_slots
        self._running = running
        self._cache = cache
        self._watermark = max(1, int(cache.pool.num_blocks * WATERMARK)) if cache.pool.num_blocks else 0

    @property
    def in_order(self) -> list[Limit]:
        """The limits, the cheapest first."""
        return [
            self._preemption,
            self._step_in_flight,
            self._slots,
            self._states,
            self._attended,
            self._tokens,
            self._blocks,
        ]

    def _preemption(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        """Blocks freed by a preemption belong to the requests that still run."""
        return "blocks" if builder.has_preempted else ""

    def _step_in_flight(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        """A preempted request restarts only when all its tokens are known."""
        return "in_flight" if request.num_in_flight else ""

    def _slots(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        return "" if self._free_slots else "max_num_seqs"

    def _states(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        states = self._cache.states
        return "states" if states is not None and len(self._running) >= states.max_requests else ""

    def _attended(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        return "" if self._encoder is None or self._encoder.has_room_to_start(request) else "encoder_cache"

    def _tokens(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        num_hits = self._cache.count_hits(request)[0].num_blocks
        num_uncomputed = request.num_uncomputed_tokens - num_hits * self._cache.block_size
        return "" if prompts.has_room(num_uncomputed) else "budget"

    def _blocks(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        num_blocks = self._cache.num_blocks_to_start(request)
        if self._running.first:
            num_blocks += self._watermark
        return "blocks" if num_blocks > builder.num_spare_blocks else ""
