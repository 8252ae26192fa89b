"""Full garbage collections wait until the core is idle, but not forever."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from octavo.core_proc import collector as collector_module
from octavo.core_proc.collector import (
    MAX_INTERVAL_S,
    MIDDLE_THRESHOLD,
    MIN_INTERVAL_S,
    YOUNG_THRESHOLD,
    IdleCollector,
)


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """The generations collected since the beginning, full ones only; the collector is left as it was."""
    thresholds = gc.get_threshold()
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(2)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)


def test_an_idle_core_runs_full_collections_and_a_busy_one_does_not(full_collections: list[int]) -> None:
    collector = IdleCollector()
    collector.start(now=0.0)
    full_collections.clear()
    garbage = weakref.ref(Cycle())
    kept = [[] for _ in range(YOUNG_THRESHOLD * (MIDDLE_THRESHOLD + 1) * 5)]
    collector.poll(MAX_INTERVAL_S / 2, is_idle=False)
    assert not full_collections, f"a full collection among {len(kept)} live objects"
    survivor = weakref.ref(Cycle())
    now = MAX_INTERVAL_S / 2
    collector.poll(now, is_idle=True)
    assert len(full_collections) == 1
    assert garbage() is None and survivor() is None
    collector.poll(now + MIN_INTERVAL_S / 2, is_idle=True)
    assert len(full_collections) == 1, "an engine that falls idle all the time does not collect all the time"
    collector.poll(now + MIN_INTERVAL_S, is_idle=True)
    assert len(full_collections) == 2


def test_a_core_that_is_never_idle_collects_once_in_a_while(full_collections: list[int]) -> None:
    collector = IdleCollector()
    collector.start(now=0.0)
    full_collections.clear()
    for second in range(1, 3 * int(MAX_INTERVAL_S)):
        collector.poll(float(second), is_idle=False)
    assert len(full_collections) == 2


def test_a_core_that_is_never_idle_collects_when_it_has_grown(
    full_collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "MAX_GROWTH", 3)
    collector = IdleCollector()
    collector.start(now=0.0)
    full_collections.clear()
    num_per_collection = (YOUNG_THRESHOLD + 1) * (MIDDLE_THRESHOLD + 1)
    kept = [[] for _ in range(2 * num_per_collection)]
    collector.poll(1.0, is_idle=False)
    assert not full_collections
    kept += [[] for _ in range(2 * num_per_collection)]
    collector.poll(2.0, is_idle=False)
    assert len(full_collections) == 1
    collector.poll(3.0, is_idle=False)
    assert len(full_collections) == 1, f"nothing was added to {len(kept)} objects"
