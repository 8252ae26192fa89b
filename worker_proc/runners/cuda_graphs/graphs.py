"""Launches the kernels of a step: one by one, or as the graph captured for steps of its size.

Knows no requests: arrays go in, one token per sampled row comes out. Kernels read only static device buffers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.logprobs.memory import LogprobsMemory
from octavo.kernels.sample import record_tokens, sample_rows
from octavo.kernels.slot_rows import read_slots
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.attention.spans import ONE_SPAN, PlanSpans
from octavo.worker_proc.batch.inputs import AttentionPieces, StepInputs
from octavo.worker_proc.device.stream import Graph, Stream, upload_array
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.parallel.stage_links import GraphStages
from octavo.worker_proc.runners.cuda_graphs.metadata import (
    GraphAttention,
    SampleRows,
    StepSize,
    Views,
    slot_mapping_name,
    state_slots,
)
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind, GraphSizes, Sizes
from octavo.worker_proc.runners.cuda_graphs.slot_table import GroupTable, SlotTable
from octavo.worker_proc.runners.cuda_graphs.step_buffer import Fields, StepBuffer
from octavo.worker_proc.runners.cuda_graphs.upload import NO_SAMPLES, AttentionPlans, StepUpload
from octavo.worker_proc.sampling.state import LARGEST


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """A graph, and the fields that it reads."""

    graph: Graph
    fields: Fields
    num_tiles: Sequence[int] = ()
    """Most tiles of attention that it computes, in each cache group."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A step whose metadata is being uploaded."""

    inputs: Fields
    samples: Fields
    compute: Graph | None
    sample: Graph | None
    has_reports: bool
    """Whether the step's samples report logprobs."""
    num_rows: int = 0
    """Number of rows without padding."""
    pieces: AttentionPieces | None = None
    """Attention pieces of a step with spans."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Sampled tokens of a step; overwritten by the next step."""

    tokens_N: Tensor
    """Token ids, int64; -1 where there is no token."""
    logprobs: LogprobsMemory | None
    """Logprobs of the rows whose requests report any; `None` if the step reports none."""


class StepGraphs:
    """The kernels of one model's steps.

    For each step call `stage`, `compute` and `sample`, in this order; `send_changes` may come between. Only `capture`
    captures graphs. A step without a graph launches its kernels one by one.

    Args:
        model: model with its weights on the stream's device.
        layers: the attention of the model's layers, with the cache.
        attention: attention of each cache group, followed by cross-attention if the model has any. It is planned for
            each step, and reads `buffer`.
        block_tables: block_table_RP of each cache group, int32, which attention reads.
        stream: stream of the device.
        table: table of the slots.
        buffer: holds the metadata of steps.
        sizes: sizes of the graphs.
        stages: exchanges rows with the previous and the next stage; `None` if the model has all layers.
        plan_spans: plans the bidirectional spans of a step, given its pieces and block tables; `None` if the model has
            no such spans. A step with spans has no graph.
    """

    def __init__(
        self,
        model: Model,
        layers: PagedCacheAttention,
        attention: Sequence[GraphAttention],
        block_tables: Sequence[Tensor],
        stream: Stream,
        table: SlotTable | GroupTable,
        buffer: StepBuffer,
        sizes: GraphSizes,
        stages: GraphStages | None = None,
        plan_spans: PlanSpans | None = None,
    ) -> None:
        self._model = model
        self._stages, self._plan_spans = stages, plan_spans
        self._layers = layers
        self._attention = attention
        self._block_tables = block_tables
        self._stream = stream
        self._table = table
        self._buffer = buffer
        self._upload = StepUpload(attention, table, buffer, has_states=model.state_group is not None)
        self._sizes: dict[GraphKind, Sizes] = {
            GraphKind.PROMPTS: sizes.prompts,
            GraphKind.DECODES: sizes.decodes,
            GraphKind.SAMPLES: sizes.decodes,
            GraphKind.REPORTS: sizes.reports,
            GraphKind.ROUNDS: Sizes(()),
        }
        device = stream.torch_device
        most = max(sizes.decodes.largest_first, default=0)
        self._tokens_N = torch.zeros(most, dtype=torch.int64, device=device)
        self._logprobs = LogprobsMemory.allocate(most, device)
        self._hidden_TD: Tensor | None = None
        """The output of graphs that compute; allocated with the first capture."""
        self._features: Sequence[Tensor] = ()
        """Memory of `Features` in the graphs."""
        self.features: Sequence[Tensor] = ()
        """`Features` of the last step: matrices TD with at least as many rows as the step."""
        self._graphs: dict[GraphKind, dict[int, _Captured]] = {kind: {} for kind in GraphKind}
        self.is_eager = False
        """Launch the kernels of all steps one by one, for example to compare their bits with those of graphs."""
        self._pool = stream.new_graph_pool()
        self._staged: Staged | None = None
        self._step_hidden_TD: Tensor | None = None

    @property
    def has_samples(self) -> bool:
        """Whether tokens are sampled here: not in other stages than the last, and not after a model that pools."""
        return self._model.stage.is_last and self._model.pooling_head is None

    def uncaptured(self, kind: GraphKind) -> list[int]:
        """Return the sizes without a graph, in the order of capture."""
        if kind in (GraphKind.SAMPLES, GraphKind.REPORTS) and not self.has_samples:
            return []
        if kind is GraphKind.DECODES and self._model.pooling_head is not None:
            return []
        return [size for size in self._sizes[kind].largest_first if size not in self._graphs[kind]]

    def capture_all(self) -> int:
        """Capture all graphs that are missing. Return their number. Blocks until all earlier work is finished."""
        missing = [(kind, size) for kind in GraphKind for size in self.uncaptured(kind)]
        for kind, size in missing:
            self.capture(kind, size)
        return len(missing)

    def stage(self, inputs: StepInputs, samples: SampleRows = NO_SAMPLES, *, has_reports: bool = False) -> None:
        """Send a step to the device, with the changes of the slots; `has_reports`: its samples report logprobs.

        The step that was staged `NUM_HOST_BUFFERS` calls ago must be over.
        """
        plans = self._upload.write_plans(inputs)
        num_tokens, num_requests, num_samples = len(inputs.token_ids_T), len(inputs.context_lens), len(samples.rows_N)
        is_eager = self.is_eager or inputs.pieces is not None
        compute = None if is_eager else self._compute_graph(num_tokens, num_requests, plans)
        kind = GraphKind.REPORTS if has_reports else GraphKind.SAMPLES
        sample = self._captured(kind, num_samples) if compute else None
        input_fields = compute.fields if compute else self._buffer.inputs(num_tokens, num_requests)
        sample_fields = sample.fields if sample else self._buffer.samples(num_samples)
        # A graph of prompts reads where the tiles end even if there are none.
        has_tiles = any(plans.num_tiles) or bool(compute and compute.num_tiles)
        self._upload.send(
            inputs, samples, input_fields, sample_fields, plans.num_words if has_tiles else plans.num_item_words
        )
        graphs = (compute.graph if compute else None, sample.graph if sample else None)
        self._staged = Staged(input_fields, sample_fields, *graphs, has_reports, num_tokens, inputs.pieces)

    def compute(self) -> None:
        """Compute the hidden states of the staged step, exchanging rows with neighbouring stages, if any."""
        num_rows = self._current.num_rows
        if self._stages is not None and not self._model.stage.is_first:
            self._stages.fetch(num_rows)
        self._compute()
        if self._stages is not None and not self._model.stage.is_last:
            self._stages.pass_on(num_rows)

    def _compute(self) -> None:
        step = self._current
        if step.compute is None:
            self._step_hidden_TD = self._hidden_of(step.inputs.views, step.pieces)
            self.features = self._model_features
        else:
            step.compute.replay()
            self._step_hidden_TD, self.features = self._hidden_TD, self._features

    def logits(self) -> Tensor:
        """Return logits_NV in float32 for the sampled rows, padding included."""
        return self.logits_of(self._current.samples.views["sample_rows"])

    def sample(self, logits_NV: Tensor | None = None, raw_NV: Tensor | None = None) -> Sampled:
        """Sample a token for each sampled row.

        `logits_NV` replaces the model's logits, which are `raw_NV` then; such a step samples without a graph.
        """
        step = self._current
        if step.sample is not None and logits_NV is None:
            step.sample.replay()
            return Sampled(self._tokens_N, self._logprobs if step.has_reports else None)
        views = step.samples.views
        if logits_NV is None:
            self._follow_adapters(views["sample_slots"])
            logits_NV = self._model.logits(self._hidden_rows(views["sample_rows"]))
        memory = LogprobsMemory.allocate(len(logits_NV), logits_NV.device) if step.has_reports else None
        return Sampled(self._sampled(views, logits_NV, None, memory, raw_NV), memory)

    def sample_at(self, samples: SampleRows, logits_MV: Tensor) -> Tensor:
        """Sample a token for some of the sampled rows from these logits, without a graph. Return tokens_M, int64."""
        arrays = {"sample_slots": samples.slots_N, "sample_positions": samples.positions_N}
        arrays["num_outputs"] = samples.num_outputs_N
        views = {name: upload_array(self._stream, array) for name, array in arrays.items()}
        return self._sampled(views, logits_MV, None, None)

    def logits_of(self, rows_R: Tensor) -> Tensor:
        """Return logits_RV in float32 for rows of the step that was computed last."""
        self._follow_adapters(self._current.inputs.views["token_slots"][rows_R])
        return self._model.logits(self._hidden_rows(rows_R)).float()

    def send_changes(self) -> None:
        """Send the changes of the slots now, not with the next step."""
        for memory in self._table.memories:
            self._buffer.send_changes(memory)

    def launch_idle(self, size: StepSize, *, changes_logits: bool) -> None:
        """Launch the kernels of a step of padding one by one, so that they are compiled.

        They compute a token of the idle slot, which has no effect. Must not be called between `stage` and `sample`.

        Args:
            size: size of the step.
            changes_logits: whether steps sample from changed logits, too.

        Blocks until everything is finished.
        """
        input_fields = self._buffer.inputs(size.num_tokens, size.num_requests)
        sample_fields = self._buffer.samples(size.num_samples)
        self._upload.send_idle(input_fields, sample_fields, [1] * len(self._attention))
        pieces = None if self._plan_spans is None else ONE_SPAN
        self._staged = Staged(input_fields, sample_fields, None, None, has_reports=False, pieces=pieces)
        self._compute()
        if self.has_samples:
            self._sample_idle(input_fields, sample_fields, changes_logits=changes_logits)
        self._stream.record_event().wait()  # the next steps use both host buffers

    def _sample_idle(self, input_fields: Fields, sample_fields: Fields, *, changes_logits: bool) -> None:
        self.sample()
        logits_NV = self.logits()
        self.sample(logits_NV, logits_NV)
        self._staged = Staged(input_fields, sample_fields, None, None, has_reports=True)
        self.sample()
        if changes_logits:
            self.sample(logits_NV, logits_NV.clone())

    def capture(self, kind: GraphKind, size: int) -> None:
        """Capture a graph. Its kernels run once before, as in `launch_idle`.

        Blocks until all earlier work is finished.
        """
        num_tiles: Sequence[int] = ()
        if kind in (GraphKind.SAMPLES, GraphKind.REPORTS):
            fields = self._buffer.samples(size)
            self._upload.send_idle(self._buffer.inputs(1, 1), fields, num_tiles)
            body = self._sample_body(kind, fields, size)
        else:
            fields = self._buffer.inputs(size, min(size, self._table.idle_slot))
            if kind is GraphKind.PROMPTS:
                num_tiles = [attention.usual_tiles(size) for attention in self._attention]
            self._upload.send_idle(fields, self._buffer.samples(0), num_tiles)
            body = self._compute_body(fields, size)
        self._keep_graph(kind, size, fields, body, num_tiles)

    def _keep_graph(
        self, kind: GraphKind, size: int, fields: Fields, body: Callable[[], object], num_tiles: Sequence[int] = ()
    ) -> None:
        body()
        self._stream.record_event().wait()  # the next steps use both host buffers
        self._graphs[kind][size] = _Captured(self._stream.capture(body, self._pool), fields, num_tiles)

    @property
    def _current(self) -> Staged:
        assert self._staged is not None, "stage() comes first"
        return self._staged

    def _captured(self, kind: GraphKind, size: int) -> _Captured | None:
        """Return the smallest graph that holds a size, if there is one."""
        return self._graphs[kind].get(self._sizes[kind].fit(size) or 0)

    def _compute_graph(self, num_tokens: int, num_requests: int, plans: AttentionPlans) -> _Captured | None:
        """Return the smallest graph that computes a step with these attention plans, if there is one."""
        # A recurrence has other kernels for several tokens.
        has_decode = not any(plans.num_tiles) and (num_tokens == num_requests or self._model.state_group is None)
        if has_decode and (decode := self._captured(GraphKind.DECODES, num_tokens)):
            return decode
        for size in self._sizes[GraphKind.PROMPTS].from_size(num_tokens):
            captured = self._graphs[GraphKind.PROMPTS].get(size)
            if captured and all(num <= most for num, most in zip(plans.num_tiles, captured.num_tiles, strict=True)):
                return captured
        return None

    def _compute_body(self, fields: Fields, size: int) -> Callable[[], object]:
        def compute() -> None:
            if (hidden_TD := self._hidden_of(fields.views)) is None:
                return
            features = self._model_features
            if self._hidden_TD is None:
                most = max(size for sizes in self._sizes.values() for size in sizes.largest_first)
                self._hidden_TD = hidden_TD.new_zeros(most, hidden_TD.shape[1])
                self._features = [one_TD.new_zeros(most, one_TD.shape[1]) for one_TD in features]
            for kept_TD, one_TD in zip([self._hidden_TD, *self._features], [hidden_TD, *features], strict=True):
                kept_TD[:size].copy_(one_TD)

        return compute

    def _sample_body(self, kind: GraphKind, fields: Fields, size: int) -> Callable[[], object]:
        memory = self._logprobs.first(size) if kind is GraphKind.REPORTS else None

        def sample() -> None:
            assert self._hidden_TD is not None, "graphs that compute are captured first"
            self._follow_adapters(fields.views["sample_slots"])
            logits_NV = self._model.logits(self._hidden_TD.index_select(0, fields.views["sample_rows"]))
            self._sampled(fields.views, logits_NV, self._tokens_N[:size], memory)

        return sample

    def _hidden_of(self, views: Views, pieces: AttentionPieces | None = None) -> Tensor | None:
        """Launch the model over a step whose fields are on the device. Return hidden_TD of the last stage."""
        slots_R = views["request_slots"]
        token_ids_T = read_slots(
            views["token_ids"],
            views["token_slots"],
            self._table.last_token_S,
            self._table.following_KS,
            slots_R,
            self._table.block_ids,
            [block_table_RP[: slots_R.shape[0]] for block_table_RP in self._block_tables],
        )
        num_groups = len(self._block_tables)
        slot_mappings = [views[slot_mapping_name(group)] for group in range(num_groups)]
        spans = self._plan_spans(pieces, self._block_tables) if self._plan_spans and pieces else None
        self._follow_adapters(views["token_slots"])
        cross = self._attention[num_groups] if len(self._attention) > num_groups else None
        self._layers.follow(self._attention[:num_groups], slot_mappings, state_slots(views), cross, spans)
        return self._model.forward(token_ids_T, views["positions"], self._layers)

    def _follow_adapters(self, slots_T: Tensor) -> None:
        """Have layers use the adapters of the requests in these slots, for the rows that they are called with next."""
        if self._model.adapter_rows is not None:
            self._model.adapter_rows.slots_T = self._table.adapters_of(slots_T)

    @property
    def _model_features(self) -> Sequence[Tensor]:
        return self._model.features.results if self._model.features is not None else ()

    def _hidden_rows(self, rows_R: Tensor) -> Tensor:
        assert self._step_hidden_TD is not None, "compute() comes first"
        return self._step_hidden_TD.index_select(0, rows_R)

    def _sampled(
        self,
        views: Views,
        logits_NV: Tensor,
        out_N: Tensor | None,
        memory: LogprobsMemory | None,
        raw_NV: Tensor | None = None,
    ) -> Tensor:
        """Sample a token for each row of logits, and store it for the next step and for penalties."""
        tokens_N = self._drawn(views, logits_NV, out_N, memory, raw_NV)
        record_tokens(self._table.requests, views["sample_slots"], tokens_N, self._table.last_token_S)
        return tokens_N

    def _drawn(
        self,
        views: Views,
        logits_NV: Tensor,
        out_N: Tensor | None,
        memory: LogprobsMemory | None,
        raw_NV: Tensor | None = None,
    ) -> Tensor:
        return sample_rows(
            logits_NV,
            self._table.requests,
            views["sample_slots"],
            views["sample_positions"],
            views["num_outputs"],
            largest=LARGEST,
            out_R=out_N,
            logprobs=memory,
            raw_RV=raw_NV,
        )
