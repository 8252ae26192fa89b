"""Which waiting request may start next: adapters delay their own requests, limits hold up the whole queue."""

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
"""Share of the blocks that admission leaves free for running requests to grow into."""

Limit = Callable[[Request, StepBuilder, PromptBudget], str]
"""Returns the `waiting_reason` if the step has no room for a request, "" if it has. Whoever is behind it waits too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The waiting request that is to start next."""

    request: Request | None
    """None: there is none."""
    delayed: LiveRequest | None = None
    """The first request before it in the queue, for whose adapter there is no slot."""

    @property
    def reason(self) -> str:
        """Why the first request of the queue is delayed, "" if it is not."""
        return "adapter" if self.delayed else ""


class AdmissionRules:
    """The rules of one scheduler.

    Args:
        limits: of the engine; the first one reached decides.
        adapters: delay requests for whose adapters there is no slot.
    """

    def __init__(self, limits: "EngineLimits", adapters: AdapterSlots) -> None:
        self._limits = limits.in_order
        self._adapters = adapters

    def candidate(self, queue: WaitingQueue) -> Candidate:
        """Return the request of a queue that is to start next if the step has room for it. Changes nothing."""
        if not self._adapters.num_slots:
            return Candidate(queue.first)
        chosen, delayed = self._adapters.choose(queue.heads())
        return Candidate(None if chosen is None else queue.unpacked(chosen), delayed)

    def limit_reached(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        """Return why the step has no room for a request, "" if it has."""
        for limit in self._limits:
            if reason := limit(request, builder, prompts):
                return reason
        return ""


class EngineLimits:
    """The resources that every engine has a limited number of: slots, tokens of a step, blocks.

    Args:
        free_slots: of the batch; only read.
        running: every running request; only read.
        cache: where the blocks are.
        encoder: keeps what requests attend to; None: the model reads tokens only.
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
        """What a preemption has freed is for the requests that still run."""
        return "blocks" if builder.has_preempted else ""

    def _step_in_flight(self, request: Request, builder: StepBuilder, prompts: PromptBudget) -> str:
        """A preempted request starts again when all its tokens are known."""
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
