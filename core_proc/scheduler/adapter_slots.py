"""`AdapterSlots`: which LoRA adapter each slot of the workers holds, which requests may start, and what must be loaded.

Loads take place between steps, in the order of the plans, so the slots are known here before a worker has read a file.
"""

from collections.abc import Iterable

from octavo.core_proc.queued_request import LiveRequest
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.protocol.adapters import NO_ADAPTER, Adapter, AdapterFault, AdapterLoad

MAX_BYPASS = 64
"""Requests with other adapters that may start before one that finds no slot. Then a slot gets no new users until it is
free, so nothing starves; slots do not change hands more often, because each change costs a load."""


class AdapterSlots:
    """The slots of one engine.

    A slot holds its adapter when its last user has left, until another adapter takes it: the one that has been without
    users for longest. Requests without an adapter are never delayed.

    Args:
        num_slots: `max_loras`; 0: the engine has no adapters.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        """Forget what the slots hold, and everything else: the workers are new."""
        num_slots = self.num_slots
        self.adapters: list[Adapter | None] = [None] * num_slots
        """What each slot holds after all plans; None: nothing."""
        self.num_users = [0] * num_slots
        """Running requests of each slot."""
        self._slot_of: dict[str, int] = {}
        """By digest."""
        self._unused = dict.fromkeys(range(num_slots))
        """Slots without users, those that have been for longest first."""
        self._loads: list[AdapterLoad] = []
        self._draining: int | None = None
        """The slot that gets no new users while an earlier request has none."""
        self._delayed_order = -1
        self._num_bypassed = 0
        """Requests that have started before the one with `_delayed_order`."""

    def names(self, heads: Iterable[LiveRequest]) -> tuple[list[str], list[str]]:
        """Return the names of the adapters of running and of waiting requests; `heads` as for `choose`."""
        used = [one.name for one, count in zip(self.adapters, self.num_users, strict=True) if one and count]
        return sorted(used), sorted({head.adapter.name for head in heads if head.adapter})

    def choose(self, heads: Iterable[LiveRequest]) -> tuple[LiveRequest | None, LiveRequest | None]:
        """Return which waiting request may start first, and the first before it that finds no slot.

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
        """Give a request that starts the slot of its adapter, which is loaded first unless it is there.

        Args:
            request: one that `choose` has returned.
            delayed: the other result.
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
        """Note that a request does not run any more."""
        slot, request.adapter_slot = request.adapter_slot, NO_ADAPTER
        if slot == NO_ADAPTER:
            return
        self.num_users[slot] -= 1
        if not self.num_users[slot]:
            self._unused[slot] = None

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads since the last call, for the plan that is finished."""
        loads, self._loads = self._loads, []
        return loads

    def fail(self, fault: AdapterFault, steps: Iterable[StepRecord], running: Iterable[Request]) -> list[Request]:
        """Empty a slot whose load has failed.

        Args:
            fault: of the load.
            steps: that of the load and those planned after it.
            running: all running requests.

        Returns:
            The requests that were computed without their adapter, whatever has become of them since, and those that
            have the slot and no step computes yet.
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
