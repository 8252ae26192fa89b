"""A queue that serves its owners in turn, so that one with much in it does not keep the others waiting.

Knows nothing of grammars.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Owner = TypeVar("Owner", bound=Hashable)


class Lane(Generic[Item, Owner]):
    """Items in the order in which each of their owners has put them, one owner after another. Safe between threads."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Owner, OrderedDict[Item, None]] = OrderedDict()
        """What is to be served, by owners; the first one's turn is next."""
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, item: Item, owners: Iterable[Owner]) -> None:
        """Add an item for each of its owners; it is served at the first turn of any of them, and not without owners."""
        with self._changed:
            for owner in owners:
                self._lines.setdefault(owner, OrderedDict())[item] = None
            self._changed.notify()

    def join(self, item: Item, owner: Owner) -> None:
        """Make somebody else an owner of an item too; one that is not in the queue is none of its business."""
        with self._changed:
            if any(item in line for line in self._lines.values()):
                self._lines.setdefault(owner, OrderedDict())[item] = None

    def get(self) -> Item | None:
        """Take out the next item; None once the queue is closed.

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
        """Let everybody who waits go, whatever is in the queue."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
