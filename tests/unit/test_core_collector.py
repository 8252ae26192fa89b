"""Full collections of garbage wait until the core is idle."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from octavo.core_proc.collector import MIDDLE_THRESHOLD, MIN_INTERVAL_S, YOUNG_THRESHOLD, IdleCollector


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


def test_only_an_idle_core_runs_full_collections(full_collections: list[int]) -> None:
    collector = IdleCollector()
    collector.start()
    full_collections.clear()
    garbage = weakref.ref(Cycle())
    kept = [[] for _ in range(YOUNG_THRESHOLD * (MIDDLE_THRESHOLD + 1) * 3)]
    assert not full_collections, f"a full collection among {len(kept)} live objects"
    survivor = weakref.ref(Cycle())
    collector.on_idle(now=5.0)
    assert len(full_collections) == 1
    assert garbage() is None and survivor() is None
    collector.on_idle(now=5.0 + MIN_INTERVAL_S / 2)
    assert len(full_collections) == 1, "an engine that falls idle all the time does not collect all the time"
    collector.on_idle(now=5.0 + MIN_INTERVAL_S)
    assert len(full_collections) == 2
