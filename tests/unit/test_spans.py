"""Spans of images that attend in both directions: steps compute them whole, and attention sees them as requests."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from octavo.core_proc.scheduler.delta import StepBuilder
from octavo.core_proc.scheduler.prefill import Prefill
from octavo.protocol.config.facts import MediaFacts
from octavo.protocol.config.media import _check_whole_images
from octavo.protocol.errors import ConfigError
from octavo.protocol.media import MediaItem
from octavo.protocol.steps import Scheduled
from octavo.worker_proc.batch.columns import SlotColumns
from octavo.worker_proc.batch.spans import BothWaysSpans, pieces_of

SPANS = [(10, 20), (30, 5), (50, 10)]


@pytest.mark.parametrize(
    ("start", "end", "pieces"),
    [
        (0, 10, [(10, False)]),
        (0, 30, [(10, False), (30, True)]),
        (16, 30, [(30, True)]),
        (5, 62, [(10, False), (30, True), (35, True), (50, False), (60, True), (62, False)]),
        (60, 61, [(61, False)]),
    ],
)
def test_chunks_are_divided_at_the_bounds_of_spans(start: int, end: int, pieces: list[tuple[int, bool]]) -> None:
    assert pieces_of(SPANS, start, end) == pieces


def test_pieces_of_a_step() -> None:
    """Requests with and without spans, decodes, and a slot that another request takes."""
    spans = BothWaysSpans(SlotColumns(4))
    spans.admit(2, SPANS)
    spans.admit(1, [])
    slots, starts, counts = np.array([1, 2, 0]), np.array([7, 5, 0]), np.array([1, 32, 3])
    pieces = spans.pieces(slots, starts, counts)
    assert pieces is not None
    assert pieces.requests_P.tolist() == [0, 1, 1, 1, 1, 2]
    assert pieces.query_starts.tolist() == [0, 1, 6, 26, 31, 33, 36]
    assert pieces.context_lens.tolist() == [8, 10, 30, 35, 37, 3]
    assert pieces.is_span_P.tolist() == [0, 0, 1, 1, 0, 0]
    assert spans.pieces(slots, np.array([7, 60, 0]), np.ones(3, dtype=np.int64)) is None, "its spans are computed"
    assert spans.pieces(slots, np.array([7, 36, 0]), np.array([1, 5, 3])) is None, "the next one comes later"
    spans.admit(2, [])
    assert spans.pieces(slots, starts, counts) is None


class FakeRequest:
    """A request with an image of several spans."""

    def __init__(self, start: int) -> None:
        self.num_computed_tokens = start
        self.media = [MediaItem(SPANS, b"", {}, is_both_ways=True)]


def chunk(start: int, num_tokens: int, *, max_step_tokens: int, num_planned: int = 0, max_chunk: int = 0) -> int:
    """Return how many tokens of a request a step computes for a share of `num_tokens`."""
    cache: Any = SimpleNamespace(groups=SimpleNamespace(windowed=[]))
    nothing: Any = None
    prefill = Prefill(cache, nothing, nothing, max_chunk, max_step_tokens=max_step_tokens)
    builder, request = StepBuilder(), cast(Any, FakeRequest(start))
    builder.scheduled = [Scheduled(1, 0, num_planned, 1)] if num_planned else []
    return prefill._with_whole_spans(builder, request, num_tokens)


def test_a_step_computes_a_span_up_to_its_end() -> None:
    assert chunk(0, 10, max_step_tokens=64) == 10
    assert chunk(0, 12, max_step_tokens=64) == 30, "more than its share"
    assert chunk(0, 12, max_step_tokens=29) == 10, "the step has no room for all of it"
    assert chunk(0, 12, max_step_tokens=64, num_planned=35) == 10
    assert chunk(10, 8, max_step_tokens=64, num_planned=50) == 0
    assert chunk(10, 8, max_step_tokens=64, max_chunk=19) == 0
    assert chunk(16, 3, max_step_tokens=64) == 14, "its beginning came from the prefix cache"
    assert chunk(30, 5, max_step_tokens=64) == 5
    assert chunk(30, 25, max_step_tokens=64) == 30


@pytest.mark.parametrize(
    ("budget", "max_chunk", "message"),
    [(99, 0, "whole images of 80 tokens beside one token of each of 20"), (100, 79, "whole images of 80")],
)
def test_steps_too_small_for_an_image_are_refused(budget: int, max_chunk: int, message: str) -> None:
    media = MediaFacts(architecture="A", hf_config={}, token_ids={"image": 1}, processor_path="", both_ways_rows=80)
    _check_whole_images(media, 100, 20, 80)
    with pytest.raises(ConfigError, match=message):
        _check_whole_images(media, budget, 20, max_chunk)
