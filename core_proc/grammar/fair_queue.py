"""`FairQueue`: serves the owners of items in turn, so that an owner with many items does not delay the others."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Owner = TypeVar("Owner", bound=Hashable)


class FairQueue(Generic[Item, Owner]):
    """Items in FIFO order per owner. Owners are served in turn. Thread-safe."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Owner, OrderedDict[Item, None]] = OrderedDict()
        """Items by owner. The first owner is served next."""
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, item: Item, owners: Iterable[Owner]) -> None:
        """Add an item for each of its owners. It is served once, at the first turn of any owner."""
        with self._changed:
            for owner in owners:
                self._lines.setdefault(owner, OrderedDict())[item] = None
            self._changed.notify()

    def join(self, item: Item, owner: Owner) -> None:
        """Add an owner to an item, if the item is in the queue."""
        with self._changed:
            if any(item in line for line in self._lines.values()):
                self._lines.setdefault(owner, OrderedDict())[item] = None

    def get(self) -> Item | None:
        """Remove and return the next item. Return None once the queue is closed.

        Blocks until: there is an item, or the queue is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            if self._is_closed:
                return None
            owner, line = next(iter(self._lines.items()))
            item = next(iter(line))
            self._lines.move_to_end(owner)
            for other, items in list(self._lines.items()):
                items.pop(item, None)
                if not items:
                    del self._lines[other]
            return item

    def close(self) -> None:
        """Wake all waiting threads, even if items are left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
