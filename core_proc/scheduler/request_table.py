"""Every live request and where it is: in the queue, in the batch, or waiting for a load."""

import heapq

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.encoder_schedule import EncoderSchedule
from octavo.core_proc.queued_request import LiveRequest, QueuedRequest
from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.request_map import RequestKey, RequestMap
from octavo.core_proc.scheduler.adapter_slots import AdapterSlots
from octavo.core_proc.scheduler.batch import RunningBatch
from octavo.core_proc.scheduler.waiting_queue import WaitingQueue
from octavo.core_proc.speculation.speculation import Speculation
from octavo.protocol.ids import SlotId


class RequestTable:
    """Moves requests between queue, batch and loads, and allocates and frees their slots and blocks.

    Args:
        batch: the running requests.
        cache: holds the blocks of requests.
        adapters: the adapter slots that running requests hold.
        speculation: holds drafts of running requests. None if the engine does not speculate.
        max_num_seqs: number of slots.
        max_model_len: most tokens of a request.
        has_adapters: whether requests may have adapters.
        encoder: keeps the encoder output that running requests attend to. None if the model reads only tokens.
    """

    def __init__(
        self,
        batch: RunningBatch,
        cache: PrefixCache,
        adapters: AdapterSlots,
        speculation: Speculation | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        has_adapters: bool,
        encoder: EncoderSchedule | None = None,
    ) -> None:
        self.encoder = encoder
        self.requests = RequestMap[LiveRequest]()
        """Every live request."""
        self.waiting = WaitingQueue(self._unpack, has_adapters=has_adapters)
        self.waiting_reason = ""
        """Why the first waiting request does not start. Empty if nothing delays it."""
        self.allowed: frozenset[RequestKey] | None = None
        """The requests that may run. None if all may."""
        self.free_slots: list[SlotId] = list(range(max_num_seqs))
        self.num_needing_input = 0
        """Number of live requests that need step input."""
        self.weight_version = 0
        """Version of the workers' weights."""
        self.batch = batch
        self.cache = cache
        self.adapters = adapters
        self._speculation = speculation
        self._max_model_len = max_model_len
        self._released: list[SlotId] = []

    def add(self, request: LiveRequest) -> None:
        """Queue a new request."""
        self.requests[request.key] = request
        self.num_needing_input += request.needs_step_input
        self.waiting.add(request)
        if isinstance(request, Request):
            self._limit_length(request)

    def eligible(self) -> WaitingQueue:
        """Return the waiting requests that may run."""
        if self.allowed is None:
            return self.waiting
        live = [self.requests.get(key) for key in self.allowed]
        return self.waiting.select([request for request in live if request and request.state is RequestState.WAITING])

    def start(self, request: Request) -> None:
        """Give a waiting request a slot. From now on it computes with the workers' current weights."""
        self.waiting.remove(request)
        request.move(RequestState.RUNNING)
        request.slot = heapq.heappop(self.free_slots)
        if self.encoder is not None:
            self.encoder.start(request)
        request.weight_version = self.weight_version

    def begin_load(self, request: Request) -> None:
        """Move a waiting request out of the queue until its blocks are copied in."""
        self.waiting.remove(request)
        request.move(RequestState.SWAPPED)
        self.cache.begin_load(request)

    def return_loaded(self, request: Request) -> None:
        """Return a request whose load has ended to the queue."""
        request.move(RequestState.WAITING)
        self.waiting.add(request)

    def preempt(self, request: Request) -> None:
        """Return a running request to the queue. Its tokens are recomputed when it runs again."""
        request.num_lost_tokens = max(
            request.num_lost_tokens, request.num_computed_tokens - request.num_uncertain_tokens
        )
        self._leave_batch(request)
        request.move(RequestState.WAITING)
        if self._speculation is not None:
            self._speculation.withdraw(request)
        request.num_preemptions += 1
        self.waiting.add(request)

    def forget(self, request: LiveRequest) -> None:
        """End a request in any state and free everything it holds."""
        if isinstance(request, Request):
            if request.state is RequestState.RUNNING:
                self._leave_batch(request)
            elif request.state is RequestState.WAITING:
                self.waiting.remove(request)
                self.cache.loads.release(request)
            request.move(RequestState.FINISHED)
            request.next_commit_check = 0
            if self._speculation is not None:
                self._speculation.forget(request)
        else:
            self.waiting.remove(request)
        self.requests.pop(request.key)
        self.num_needing_input -= request.needs_step_input

    def take_released(self) -> list[SlotId]:
        """Return the slots released since the last call."""
        released, self._released = self._released, []
        return released

    def _leave_batch(self, request: Request) -> None:
        """Free a running request's slot and blocks.

        A step in flight may still write to them. This is harmless: workers execute steps in order, and the next owner
        writes in a later step.
        """
        assert request.slot is not None
        self.batch.remove(request)
        self.cache.release(request)
        self.adapters.leave(request)
        if self.encoder is not None:
            self.encoder.leave(request)
        heapq.heappush(self.free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = None

    def _unpack(self, queued: QueuedRequest) -> Request:
        request = queued.unpack()
        self._limit_length(request)
        self.requests[request.key] = request
        return request

    def _limit_length(self, request: Request) -> None:
        if not request.is_pooled:  # a pooled result counts as a token but occupies no position of the model
            request.max_num_tokens = min(request.max_num_tokens, self._max_model_len)
