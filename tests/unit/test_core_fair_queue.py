"""A queue that serves its owners in turn."""

import threading

from octavo.core_proc.grammar.fair_queue import FairQueue


def served(queue: FairQueue[str, str], count: int) -> list[str | None]:
    return [queue.get() for _ in range(count)]


def test_owners_take_turns_and_each_keeps_its_order() -> None:
    queue = FairQueue[str, str]()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.put(item, item[0])
    assert served(queue, 6) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_new_owner_is_served_after_those_already_waiting() -> None:
    queue = FairQueue[str, str]()
    queue.put("a1", "a"), queue.put("a2", "a"), queue.put("b1", "b")
    assert served(queue, 1) == ["a1"]
    queue.put("c1", "c")
    assert served(queue, 3) == ["b1", "a2", "c1"]


def test_an_item_of_several_is_served_once() -> None:
    queue = FairQueue[str, str]()
    queue.put("a1", "a"), queue.put("a2", "a"), queue.put("both", "ab")
    queue.put("never", [])
    assert served(queue, 2) == ["a1", "both"]
    queue.join("a2", "c"), queue.join("gone", "c")
    queue.put("a3", "a")
    assert served(queue, 2) == ["a2", "a3"]


def test_closing_lets_those_go_who_wait() -> None:
    queue = FairQueue[str, str]()
    got: list[str | None] = ["nothing yet"]
    thread = threading.Thread(target=lambda: got.append(queue.get()))
    thread.start()
    queue.close()
    thread.join(10)
    assert got[1:] == [None]
    queue.put("late", "a")
    assert queue.get() is None
