"""`SpanAttention`: bidirectional attention within image spans on a GPU, for causal models.

Causal attention first computes all rows of a step. The rows of spans are then computed again, as a step of their own
whose requests are the spans.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from octavo.kernels.paged_attention.gpu import StepAttention
from octavo.kernels.paged_attention.gpu_plan import Limits
from octavo.worker_proc.batch.inputs import AttentionPieces
from octavo.worker_proc.cache.groups import CacheGroup
from octavo.worker_proc.device.stream import Stream, upload_array

ONE_SPAN = AttentionPieces(np.zeros(1, np.int64), np.arange(2), np.ones(1, np.int64), np.ones(1, np.int8))
"""A span of one row, to compile kernels."""


class SpanAttention:
    """The spans of one step.

    Args:
        groups: cache groups of the model.
        block_size: block size of the cache.
        stream: stream of the device, to which plans are sent.
        pieces: attention pieces of the step.
        block_tables: block_table_RP of each group, for the requests of the step.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        stream: Stream,
        pieces: AttentionPieces,
        block_tables: Sequence[Tensor],
    ) -> None:
        is_span_P = pieces.is_span_P.astype(bool)
        starts, ends = pieces.query_starts[:-1][is_span_P], pieces.query_starts[1:][is_span_P]
        self._rows_X = upload_array(stream, np.concatenate([*map(np.arange, starts, ends)]))
        requests = upload_array(stream, pieces.requests_P[is_span_P])
        query_starts = np.concatenate(([0], (ends - starts).cumsum()))
        limits = Limits(len(starts), int(query_starts[-1]), 0)
        self._attention = []
        for group, block_table_RP in zip(groups, block_tables, strict=True):
            shape, tables = replace(group.shape, is_span=True), block_table_RP.index_select(0, requests)
            attention = StepAttention(shape, block_size, limits, tables)
            words = np.empty(attention.layout.num_words, dtype=np.int32)
            attention.write_plan(words, query_starts, pieces.context_lens[is_span_P])
            attention.words_W = upload_array(stream, words)
            self._attention.append(attention)

    def overwrite(self, out_TNV: Tensor, group: int, q_TNH: Tensor, *caches: Tensor, **settings: Any) -> None:
        """Overwrite the causal results of span rows with bidirectional ones.

        Args:
            out_TNV: output of all rows.
            group: cache group of the layer.
            q_TNH: queries of all rows.
            caches: keys and values of the layer.
            settings: see `octavo.kernels.paged_attention.PagedAttention`.
        """
        spans = self._attention[group](q_TNH.index_select(0, self._rows_X), *caches, **settings)
        out_TNV.index_copy_(0, self._rows_X, spans)


PlanSpans: TypeAlias = Callable[[AttentionPieces, Sequence[Tensor]], SpanAttention]
"""Makes the `SpanAttention` of a step, given its pieces and block tables."""
