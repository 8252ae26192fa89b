"""Launches the kernels of a step: one by one, or as the graphs captured for steps of its size.

Knows no request: arrays go in, one token per sampled row comes out. Kernels read only static buffers of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.sample import count_tokens, sample_rows
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.batch.inputs import GroupInputs, StepInputs
from octavo.worker_proc.device.stream import Graph, Stream
from octavo.worker_proc.executor.runner import ChangeLogits
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs.metadata import (
    NO_SLOT,
    SampleRows,
    StepAttention,
    StepSize,
    Views,
    fill,
    slot_mapping_name,
    token_ids_of,
)
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphSizes
from octavo.worker_proc.runners.cuda_graphs.slot_table import SlotTable
from octavo.worker_proc.runners.cuda_graphs.step_buffer import StepBuffer
from octavo.worker_proc.sampling.state import LARGEST

NO_SAMPLES = SampleRows(*(np.empty(0, np.int64) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The two halves of a decode of one size."""

    compute: Graph
    """Up to the hidden states of all rows."""
    sample: Graph
    """From there to their tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A step whose metadata is being uploaded."""

    views: Views
    graphs: _Graphs | None


class StepGraphs:
    """The kernels of one model's steps.

    Call for each step `stage`, `compute`, `sample`, in this order; `send_changes` may come between.

    Args:
        model: with its weights on the stream's device.
        layers: the attention of the model's layers, with the cache.
        attention: of each cache group, planned for each step; reads its plan from `buffer`.
        block_tables: block_table_RP of each cache group, int32; what its attention reads.
        stream: of the device.
        table: of the slots.
        buffer: for the metadata of steps.
        sizes: of the graphs.
    """

    def __init__(
        self,
        model: Model,
        layers: PagedCacheAttention,
        attention: Sequence[StepAttention],
        block_tables: Sequence[Tensor],
        stream: Stream,
        table: SlotTable,
        buffer: StepBuffer,
        sizes: GraphSizes,
    ) -> None:
        self._model = model
        self._layers = layers
        self._attention = attention
        self._block_tables = block_tables
        self._stream = stream
        self._table = table
        self._buffer = buffer
        self._sizes = sizes
        largest = max(self._sizes.largest_first, default=0)
        self._tokens_N = torch.zeros(largest, dtype=torch.int64, device=stream.torch_device)
        self._hidden_ND: Tensor | None = None
        """The output of graphs; allocated with the first capture."""
        self._graphs: dict[int, _Graphs] = {}
        self._pool = stream.new_graph_pool()
        self._staged: _Staged | None = None
        self._step_hidden_TD: Tensor | None = None

    @property
    def uncaptured(self) -> list[int]:
        """Sizes without a graph, in the order of capture."""
        return [size for size in self._sizes.largest_first if size not in self._graphs]

    def stage(self, inputs: StepInputs, samples: SampleRows) -> None:
        """Send a step to the device, with the changes of the slots.

        The step that was staged `NUM_HOST_BUFFERS` calls ago must be over. Captures the graph of the step's size if it
        is missing.
        """
        size = StepSize(len(inputs.token_ids_T), len(inputs.context_lens), len(samples.rows_N))
        captured = self._sizes.fit(size.num_requests) if size.is_decode else None
        if captured is not None and captured not in self._graphs:
            self.capture(captured)
        graphs = None if captured is None else self._graphs[captured]
        has_tiles = self._send(size if captured is None else StepSize.decode(captured), inputs, samples)
        if has_tiles:  # more keys than partial sums fit into: computed without the graph, with the same bits
            graphs = None
        self._staged = _Staged(self._buffer.views(size if captured is None else StepSize.decode(captured)), graphs)

    def compute(self) -> None:
        """Compute the hidden states of the staged step."""
        step = self._current
        if step.graphs is None:
            self._step_hidden_TD = self._hidden_of(step.views)
        else:
            step.graphs.compute.replay()
            self._step_hidden_TD = self._hidden_ND

    def changed_logits(self, change_logits: ChangeLogits, num_samples: int) -> Tensor:
        """Return logits for `sample`, changed for the first `num_samples` rows; the others are padding."""
        logits_NV = self.logits_of(self._current.views["sample_rows"]).float()
        logits_NV[:num_samples] = change_logits(logits_NV[:num_samples])
        return logits_NV

    def sample(self, logits_NV: Tensor | None = None) -> Tensor:
        """Sample a token for each sampled row; int64, -1 if there is none. Overwritten by the next step.

        `logits_NV` replaces the model's logits; such a step samples without a graph.
        """
        step = self._current
        if logits_NV is not None:
            return self._sampled(step.views, logits_NV)
        if step.graphs is None:
            return self._sampled(step.views, self.logits_of(step.views["sample_rows"]))
        step.graphs.sample.replay()
        return self._tokens_N

    def logits_of(self, rows_R: Tensor) -> Tensor:
        """Return logits_RV in float32 for rows of the step that was computed last."""
        return self._model.logits(self._hidden_rows(rows_R))

    def send_changes(self) -> None:
        """Send the changes of the slots now, not with the next step."""
        for memory in self._table.memories:
            self._buffer.send_changes(memory)

    def capture(self, num_requests: int) -> None:
        """Capture the graphs of one size. The kernels run once before, so that none is compiled during the capture.

        They compute a token of the idle slot, which has no effect. Must not be called between `stage` and `sample`.

        Blocks until: all work before is finished.
        """
        self._stream.record_event().wait()  # so that both host buffers are free
        size = StepSize.decode(num_requests)
        self._send(size, _idle_step(self._table.idle_slot, len(self._attention)), NO_SAMPLES)
        views = self._buffer.views(size)
        hidden_ND = self._hidden_of(views)
        if self._hidden_ND is None:
            rows = len(self._tokens_N)
            self._hidden_ND = torch.zeros(rows, hidden_ND.shape[1], dtype=hidden_ND.dtype, device=hidden_ND.device)
        self._sampled(views, self._model.logits(hidden_ND))
        stored_ND, tokens_N = self._hidden_ND[:num_requests], self._tokens_N[:num_requests]
        compute = self._stream.capture(lambda: stored_ND.copy_(self._hidden_of(views)), self._pool)
        sample = self._stream.capture(
            lambda: tokens_N.copy_(self._sampled(views, self._model.logits(stored_ND))), self._pool
        )
        self._graphs[num_requests] = _Graphs(compute, sample)

    @property
    def _current(self) -> _Staged:
        assert self._staged is not None, "stage() comes first"
        return self._staged

    def _send(self, size: StepSize, inputs: StepInputs, samples: SampleRows) -> bool:
        """Fill the next host buffer and copy it; returns whether there are attention tiles, which no graph computes."""
        self._buffer.advance()
        query_starts, context_lens = fill(self._buffer.arrays(size), inputs, samples, self._table.idle_slot)
        words, start, end, has_tiles = self._buffer.attention_plan(), 0, 0, False
        for attention in self._attention:
            layout = attention.layout
            counts = attention.write_plan(words[start : start + layout.num_words], query_starts, context_lens)
            end = start + (layout.num_words if counts.num_tiles else layout.item_requests + counts.num_items)
            start += layout.num_words
            has_tiles |= counts.num_tiles > 0
        lists, memory = self._table.memories
        self._buffer.send_changes(lists)
        self._buffer.send(size, end, memory)
        return has_tiles

    def _hidden_of(self, views: Views) -> Tensor:
        """Launch the model over a step whose fields are on the device; returns hidden_TD."""
        slots_R = views["request_slots"]
        for block_ids_SP, block_table_RP in zip(self._table.block_ids, self._block_tables, strict=True):
            torch.index_select(block_ids_SP, 0, slots_R, out=block_table_RP[: slots_R.shape[0]])
        slot_mappings = [views[slot_mapping_name(group)] for group in range(len(self._attention))]
        self._layers.follow(self._attention, slot_mappings)
        return self._model.forward(token_ids_of(views, self._table.last_token_S), views["positions"], self._layers)

    def _hidden_rows(self, rows_R: Tensor) -> Tensor:
        assert self._step_hidden_TD is not None, "compute() comes first"
        return self._step_hidden_TD.index_select(0, rows_R)

    def _sampled(self, views: Views, logits_NV: Tensor) -> Tensor:
        """Sample a token for each row of logits, and store it for the next step and for penalties."""
        slots_N, requests = views["sample_slots"], self._table.requests
        positions_N, num_outputs_N = views["sample_positions"], views["num_outputs"]
        tokens_N = sample_rows(logits_NV, requests, slots_N, positions_N, num_outputs_N, largest=LARGEST)
        count_tokens(requests, slots_N, tokens_N)
        # A request without a token has failed, but its next step may have been launched already.
        self._table.last_token_S.index_copy_(0, slots_N, tokens_N.clamp(min=0))
        return tokens_N


def _idle_step(idle_slot: int, num_groups: int) -> StepInputs:
    """Return a decode of the idle slot, which does not write to the cache."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    return StepInputs(
        token_ids_T=zero,
        positions_T=zero,
        query_starts=np.arange(2),
        context_lens=one,
        slots_T=idle_slot * one,
        groups=(GroupInputs(NO_SLOT * one, None),) * num_groups,
    )
