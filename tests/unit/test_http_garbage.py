"""Garbage collection in the server: no full collection while many requests are live."""

import gc
from collections.abc import Iterator

import pytest

from octavo.frontend.http import garbage
from octavo.frontend.http.garbage import FEW_REQUESTS, INTERVAL_S, LONGEST_INTERVAL_S, FullCollections


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """Count full collections, and restore the thresholds. Objects stay frozen, as `tests/conftest.py` froze them."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)


def test_many_live_objects_cause_no_full_collection(full_collections: list[int]) -> None:
    live = [[number] for number in range(10)]
    garbage.limit_gc_pauses()
    full_collections.clear()
    live += [[number] for number in range(garbage.NEW_OBJECTS * (garbage.YOUNG_COLLECTIONS + 2) * 100)]
    assert len(live) > 10**6 and gc.get_count()[2] >= 10, "the middle generation was collected often"
    assert not full_collections


def test_full_collections_wait_for_few_requests_but_not_for_ever(
    full_collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_live = FEW_REQUESTS + 1
    collections = FullCollections(lambda: num_live, 0.0)
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1))
    collections.tick(2 * INTERVAL_S)
    assert not full_collections
    num_live = FEW_REQUESTS
    collections.tick(2 * INTERVAL_S)
    assert len(full_collections) == 1
    collections.tick(2 * INTERVAL_S + 1)
    assert len(full_collections) == 1, "not twice in a row"
    num_live = FEW_REQUESTS + 1
    collections.tick(2 * INTERVAL_S + LONGEST_INTERVAL_S)
    assert len(full_collections) == 2
    monkeypatch.setattr(gc, "get_count", lambda: (9, 9, 0))
    collections.tick(10 * LONGEST_INTERVAL_S)
    assert len(full_collections) == 2, "an idle server collects nothing"
