"""Spans of image positions that attend to each other in both directions, in a causal model (Gemma 3).

Attention computes a span as a request of its own that sees all of its keys. A step computes a span up to its end, but
its beginning may come from the prefix cache.
"""

from collections.abc import Sequence

import numpy as np

from octavo.protocol.prompt_embeds import Span
from octavo.worker_proc.batch.columns import SlotColumns
from octavo.worker_proc.batch.inputs import AttentionPieces, Ints


class BothWaysSpans:
    """The bidirectional spans of a batch's requests.

    Args:
        columns: columns of the batch.
    """

    def __init__(self, columns: SlotColumns) -> None:
        self._columns = columns
        self._spans: dict[int, Sequence[Span]] = {}
        """Spans by slot."""

    def admit(self, slot: int, spans: Sequence[Span]) -> None:
        """Record the spans of a request that enters the batch."""
        self._spans[slot] = spans
        self._columns.spans_end_S[slot] = sum(spans[-1]) if spans else 0

    def pieces(self, slots_R: Ints, starts_R: Ints, counts_R: Ints) -> AttentionPieces | None:
        """Return the attention pieces of a step's requests; `None` if the step computes no span."""
        if not (starts_R < self._columns.spans_end_S[slots_R]).any():
            return None
        requests, ends, is_span = [], [], []
        for request, (slot, start, count) in enumerate(
            zip(slots_R.tolist(), starts_R.tolist(), counts_R.tolist(), strict=True)
        ):
            end = start + count
            for piece_end, is_in_span in pieces_of(self._spans.get(slot, ()), start, end):
                requests.append(request)
                ends.append(piece_end)
                is_span.append(is_in_span)
        if not any(is_span):
            return None
        requests_P, context_lens = np.array(requests), np.array(ends)
        bounds_R = counts_R.cumsum() - counts_R - starts_R
        query_starts = np.concatenate(([0], context_lens + bounds_R[requests_P]))
        return AttentionPieces(requests_P, query_starts, context_lens, np.array(is_span, dtype=np.int8))


def pieces_of(spans: Sequence[Span], start: int, end: int) -> list[tuple[int, bool]]:
    """Divide the positions [start, end) at the bounds of spans. Return each piece's end and whether it is a span."""
    pieces = []
    for position, num_rows in spans:
        begin, stop = max(start, position), min(end, position + num_rows)
        if begin >= stop:
            continue
        if start < begin:
            pieces.append((begin, False))
        pieces.append((stop, True))
        start = stop
    return [*pieces, (end, False)] if start < end else pieces
