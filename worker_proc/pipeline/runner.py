"""Runs the kernels of a step: one by one, or as the graphs that were captured of steps of its size.

Knows no request: it is given arrays, and says which token each row has drawn. Reads on the device only its own buffers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.sample import count_tokens, sample_rows
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.device.stream import Graph, Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.pipeline.metadata import (
    NO_SLOT,
    DrawRows,
    StepAttention,
    StepSize,
    Views,
    fill,
    token_ids_of,
)
from octavo.worker_proc.pipeline.sizes import GraphSizes
from octavo.worker_proc.pipeline.slot_table import SlotTable
from octavo.worker_proc.pipeline.step_buffer import StepBuffer
from octavo.worker_proc.sampling.state import LARGEST

NO_DRAWS = DrawRows(*(np.empty(0, np.int64) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The two halves of a decode of one size."""

    compute: Graph
    """Up to the hidden states of all rows."""
    draw: Graph
    """From there to their tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A step whose arrays are on the way to the device."""

    views: Views
    graphs: _Graphs | None


class StepRunner:
    """The kernels of one model's steps.

    Call for each step `stage`, `compute`, `draw`, in this order; `apply_changes` may come between.

    Args:
        model: with its weights on the stream's device.
        layers: the attention of the model's layers, with the cache.
        attention: what is planned for each step; reads its plan from `buffer`.
        block_table_RP: int32; what the attention reads.
        stream: what the device is told.
        table: of the slots.
        buffer: for what steps tell the device.
        sizes: of the graphs.
    """

    def __init__(
        self,
        model: Model,
        layers: PagedCacheAttention,
        attention: StepAttention,
        block_table_RP: Tensor,
        stream: Stream,
        table: SlotTable,
        buffer: StepBuffer,
        sizes: GraphSizes,
    ) -> None:
        self._model = model
        self._layers = layers
        self._attention = attention
        self._block_table_RP = block_table_RP
        self._stream = stream
        self._table = table
        self._buffer = buffer
        self._sizes = sizes
        largest = max(self._sizes.largest_first, default=0)
        self._tokens_N = torch.zeros(largest, dtype=torch.int64, device=stream.torch_device)
        self._hidden_ND: Tensor | None = None
        """Where graphs leave hidden states; made when the first is captured."""
        self._graphs: dict[int, _Graphs] = {}
        self._staged: _Staged | None = None
        self._step_hidden_TD: Tensor | None = None

    @property
    def uncaptured(self) -> list[int]:
        """Sizes without a graph, in the order in which they should get one."""
        return [size for size in self._sizes.largest_first if size not in self._graphs]

    def stage(self, inputs: StepInputs, draws: DrawRows) -> None:
        """Send a step to the device, with the changes of the slots.

        The step that was staged `NUM_HOST_BUFFERS` calls ago must be over. Captures a graph of the step's size if there
        should be one and is none.
        """
        size = StepSize(len(inputs.token_ids_T), len(inputs.context_lens), len(draws.rows_N))
        captured = self._sizes.fit(size.num_requests) if size.is_decode else None
        if captured is not None and captured not in self._graphs:
            self.capture(captured)
        graphs = None if captured is None else self._graphs[captured]
        has_tiles = self._send(size if captured is None else StepSize.decode(captured), inputs, draws)
        if has_tiles:  # more keys than the attention's memory for decodes: right, but no graph knows of it
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

    def draw(self) -> Tensor:
        """Draw a token for each row that does; int64, -1 where there is none. Overwritten by the next step."""
        step = self._current
        if step.graphs is None:
            return self._drawn(step.views, self._hidden_rows(step.views["draw_rows"]))
        step.graphs.draw.replay()
        return self._tokens_N

    def logits_of(self, rows_R: Tensor) -> Tensor:
        """Return logits_RV in float32 for rows of the step that was computed last."""
        return self._model.logits(self._hidden_rows(rows_R))

    def apply_changes(self) -> None:
        """Send the changes of the slots now, not with the next step."""
        self._buffer.send_changes(self._table.memory)

    def replace_table(self, table: SlotTable) -> None:
        """Go on with another table of the slots; all graphs are forgotten, because they read the old one."""
        self._table = table
        self._graphs.clear()

    def capture(self, num_requests: int) -> None:
        """Capture the graphs of one size. The kernels run once before, so that none is compiled within the capture.

        What they compute means nothing and does no harm: a token of the slot that no request has. Not between `stage`
        and `draw`.

        Blocks until: the device has done what was asked before.
        """
        self._stream.mark().wait()  # so that both host buffers are free
        size = StepSize.decode(num_requests)
        self._send(size, _idle_step(self._table.idle_slot), NO_DRAWS)
        views = self._buffer.views(size)
        hidden_ND = self._hidden_of(views)
        if self._hidden_ND is None:
            rows = len(self._tokens_N)
            self._hidden_ND = torch.zeros(rows, hidden_ND.shape[1], dtype=hidden_ND.dtype, device=hidden_ND.device)
        self._drawn(views, hidden_ND)
        stored_ND, tokens_N = self._hidden_ND[:num_requests], self._tokens_N[:num_requests]
        compute = self._stream.capture(lambda: stored_ND.copy_(self._hidden_of(views)))
        draw = self._stream.capture(lambda: tokens_N.copy_(self._drawn(views, stored_ND)))
        self._graphs[num_requests] = _Graphs(compute, draw)

    @property
    def _current(self) -> _Staged:
        assert self._staged is not None, "stage() comes first"
        return self._staged

    def _send(self, size: StepSize, inputs: StepInputs, draws: DrawRows) -> bool:
        """Fill the next host buffer and copy it; returns whether the attention has pieces that no graph knows of."""
        self._buffer.advance()
        query_starts, context_lens = fill(self._buffer.arrays(size), inputs, draws, self._table.idle_slot)
        layout = self._attention.layout
        counts = self._attention.write_plan(self._buffer.plan_words(), query_starts, context_lens)
        num_words = layout.num_words if counts.num_tiles else layout.item_requests + counts.num_items
        self._buffer.send(size, num_words, self._table.memory)
        return counts.num_tiles > 0

    def _hidden_of(self, views: Views) -> Tensor:
        """Compute hidden_TD of a step whose fields are on the device."""
        slots_R = views["request_slots"]
        block_table_RP = self._block_table_RP[: slots_R.shape[0]]
        torch.index_select(self._table.block_ids_SP, 0, slots_R, out=block_table_RP)
        self._layers.follow(self._attention, views["slot_mapping"])
        return self._model.forward(token_ids_of(views, self._table.last_token_S), views["positions"], self._layers)

    def _hidden_rows(self, rows_R: Tensor) -> Tensor:
        assert self._step_hidden_TD is not None, "compute() comes first"
        return self._step_hidden_TD.index_select(0, rows_R)

    def _drawn(self, views: Views, hidden_ND: Tensor) -> Tensor:
        """Draw a token for each row of hidden states, and remember it for the next step and for penalties."""
        slots_N, requests = views["draw_slots"], self._table.requests
        logits_NV = self._model.logits(hidden_ND)
        positions_N, num_outputs_N = views["draw_positions"], views["num_outputs"]
        tokens_N = sample_rows(logits_NV, requests, slots_N, positions_N, num_outputs_N, largest=LARGEST)
        count_tokens(requests, slots_N, tokens_N)
        # A request without a token has failed, but its next step may be on the way already.
        self._table.last_token_S.index_copy_(0, slots_N, tokens_N.clamp(min=0))
        return tokens_N


def _idle_step(idle_slot: int) -> StepInputs:
    """Return a decode of the slot that no request has, which leaves no trace in the cache."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    return StepInputs(
        token_ids_T=zero,
        positions_T=zero,
        query_starts=np.arange(2),
        context_lens=one,
        block_table_RP=np.zeros((1, 1), np.int32),
        slots_T=idle_slot * one,
        slot_mapping_T=NO_SLOT * one,
    )
