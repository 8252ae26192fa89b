"""`AdapterSlots`: the LoRA adapter in each worker slot, which requests may start, and which adapters must be loaded.

Workers load adapters between steps, in plan order. So the scheduler knows what each slot will hold before a worker has
read the file.
"""

from collections.abc import Iterable

from octavo.core_proc.queued_request import LiveRequest
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.protocol.adapters import NO_ADAPTER, Adapter, AdapterFault, AdapterLoad

MAX_BYPASS = 64
"""How many requests with other adapters may overtake a request that finds no slot. After that, one slot accepts no new
users until it is free, so no request starves. The limit is high because each change of adapter costs a load."""


class AdapterSlots:
    """The adapter slots of one engine.

    A slot keeps its adapter after its last user has left. The slot that has been unused for longest is given to the
    next adapter. Requests without an adapter are never delayed.

    Args:
        num_slots: `max_loras`; 0 if the engine has no adapters.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        """Forget all slots and loads: the workers are new."""
        num_slots = self.num_slots
        self.adapters: list[Adapter | None] = [None] * num_slots
        """The adapter that each slot holds once all plans are executed. None if empty."""
        self.num_users = [0] * num_slots
        """Number of running requests per slot."""
        self._slot_of: dict[str, int] = {}
        """Slot of each adapter, by digest."""
        self._unused = dict.fromkeys(range(num_slots))
        """Slots without users, the longest unused first."""
        self._loads: list[AdapterLoad] = []
        self._draining: int | None = None
        """The slot that accepts no new users because an earlier request needs one. None if there is no such slot."""
        self._delayed_order = -1
        self._num_bypassed = 0
        """Number of requests that have overtaken the request with `_delayed_order`."""

    def names(self, heads: Iterable[LiveRequest]) -> tuple[list[str], list[str]]:
        """Return the adapter names of running and of waiting requests; `heads` as for `choose`."""
        used = [one.name for one, count in zip(self.adapters, self.num_users, strict=True) if one and count]
        return sorted(used), sorted({head.adapter.name for head in heads if head.adapter})

    def choose(self, heads: Iterable[LiveRequest]) -> tuple[LiveRequest | None, LiveRequest | None]:
        """Return the waiting request that may start first, and the first one before it that finds no slot.

        Args:
            heads: the first waiting request of each adapter.
        """
        delayed = None
        for head in sorted(heads, key=lambda head: head.order):
            slot = NO_ADAPTER if head.adapter is None else self._slot_of.get(head.adapter.digest)
            if slot is None and not self._unused:
                delayed = delayed or head
            elif delayed is None or slot is None or slot != self._draining:
                return head, delayed
        return None, delayed

    def enter(self, request: Request, delayed: LiveRequest | None) -> None:
        """Give a starting request the slot of its adapter. If no slot holds the adapter, it is loaded.

        Args:
            request: the request that `choose` returned.
            delayed: the second result of `choose`.
        """
        adapter = request.adapter
        if adapter is None:
            return
        if delayed is not None:
            self._count_bypass(delayed)
        slot = self._slot_of.get(adapter.digest)
        if slot is None:
            slot = self._load(adapter)
        self._unused.pop(slot, None)
        self.num_users[slot] += 1
        request.adapter_slot = slot

    def leave(self, request: Request) -> None:
        """Note that a request has stopped running."""
        slot, request.adapter_slot = request.adapter_slot, NO_ADAPTER
        if slot == NO_ADAPTER:
            return
        self.num_users[slot] -= 1
        if not self.num_users[slot]:
            self._unused[slot] = None

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads since the last call, for the plan being finished."""
        loads, self._loads = self._loads, []
        return loads

    def fail(self, fault: AdapterFault, steps: Iterable[StepRecord], running: Iterable[Request]) -> list[Request]:
        """Empty a slot whose load has failed.

        Args:
            fault: why the load failed.
            steps: the step with the load and the steps planned after it.
            running: all running requests.

        Returns:
            The requests that were computed without their adapter, in whatever state they are now, and those that use
            the slot but are in no step yet.
        """
        requests = [request for record in steps for request in record.requests]
        if self._slot_of.get(fault.digest) == fault.slot:  # otherwise another adapter has taken the slot since
            del self._slot_of[fault.digest]
            self.adapters[fault.slot] = None
            requests += [request for request in running if request.adapter_slot == fault.slot]
        return [one for one in dict.fromkeys(requests) if one.adapter and one.adapter.digest == fault.digest]

    def _load(self, adapter: Adapter) -> int:
        slot = next((slot for slot in self._unused if self.adapters[slot] is None), next(iter(self._unused)))
        if (evicted := self.adapters[slot]) is not None:
            del self._slot_of[evicted.digest]
        self.adapters[slot] = adapter
        self._slot_of[adapter.digest] = slot
        self._loads.append(AdapterLoad(slot, adapter))
        self._draining = None
        return slot

    def _count_bypass(self, delayed: LiveRequest) -> None:
        if delayed.order != self._delayed_order:
            self._delayed_order, self._num_bypassed = delayed.order, 0
        self._num_bypassed += 1
        if self._num_bypassed >= MAX_BYPASS and self._draining is None:
            self._draining = min(range(self.num_slots), key=lambda slot: (self.num_users[slot], slot))
