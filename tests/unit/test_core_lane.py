"""A queue that serves its owners in turn."""

import threading

from octavo.core_proc.grammar.lane import Lane


def served(lane: Lane[str, str], count: int) -> list[str | None]:
    return [lane.get() for _ in range(count)]


def test_owners_take_turns_and_each_keeps_its_order() -> None:
    lane = Lane[str, str]()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        lane.put(item, item[0])
    assert served(lane, 6) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_one_who_comes_later_is_next_but_those_who_wait() -> None:
    lane = Lane[str, str]()
    lane.put("a1", "a"), lane.put("a2", "a"), lane.put("b1", "b")
    assert served(lane, 1) == ["a1"]
    lane.put("c1", "c")
    assert served(lane, 3) == ["b1", "a2", "c1"]


def test_an_item_of_several_is_served_once() -> None:
    lane = Lane[str, str]()
    lane.put("a1", "a"), lane.put("a2", "a"), lane.put("both", "ab")
    lane.put("never", [])
    assert served(lane, 2) == ["a1", "both"]
    lane.join("a2", "c"), lane.join("gone", "c")
    lane.put("a3", "a")
    assert served(lane, 2) == ["a2", "a3"]


def test_closing_lets_those_go_who_wait() -> None:
    lane = Lane[str, str]()
    got: list[str | None] = ["nothing yet"]
    thread = threading.Thread(target=lambda: got.append(lane.get()))
    thread.start()
    lane.close()
    thread.join(10)
    assert got[1:] == [None]
    lane.put("late", "a")
    assert lane.get() is None
