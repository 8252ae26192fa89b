"""`FairQueue`: serves the owners of its items in turn, so that one with many items does not delay the others."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Owner = TypeVar("Owner", bound=Hashable)


class FairQueue(Generic[Item, Owner]):
    """Items in FIFO order per owner; owners take turns. Thread-safe."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Owner, OrderedDict[Item, None]] = OrderedDict()
        """Items by owner; the first owner's turn is next."""
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, item: Item, owners: Iterable[Owner]) -> None:
        """Add an item for each of its owners. It is served once, at the first turn of any of them."""
        with self._changed:
            for owner in owners:
                self._lines.setdefault(owner, OrderedDict())[item] = None
            self._changed.notify()

    def join(self, item: Item, owner: Owner) -> None:
        """Add an owner to an item, if that is in the queue."""
        with self._changed:
            if any(item in line for line in self._lines.values()):
                self._lines.setdefault(owner, OrderedDict())[item] = None

    def get(self) -> Item | None:
        """Remove and return the next item; None once the queue is closed.

        Blocks until: there is one.
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
        """Wake up all waiting threads, whatever is in the queue."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
