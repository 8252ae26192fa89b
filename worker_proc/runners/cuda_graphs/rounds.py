"""`DeviceRounds`: rounds of drafting that a device computes one after another, without the host.

Each round is a graph. It first computes the positions, the cache slots and the attention plan of its rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.logprobs.memory import LogprobsMemory
from octavo.kernels.slot_rows import PENDING, advance_rows, rewind_rows
from octavo.worker_proc.batch.inputs import Ints, StepInputs
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.executor.runner import Samples
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.runners.cuda_graphs.forward import GraphForward
from octavo.worker_proc.runners.cuda_graphs.graphs import Staged, StepGraphs
from octavo.worker_proc.runners.cuda_graphs.metadata import SampleRows, Views, slot_mapping_name
from octavo.worker_proc.runners.cuda_graphs.runner import CudaGraphRunner
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind, Sizes
from octavo.worker_proc.runners.cuda_graphs.slot_table import GroupTable
from octavo.worker_proc.runners.cuda_graphs.step_buffer import Fields
from octavo.worker_proc.runners.rounds import Drafts, PendingDrafts, draft_inputs, first_draw, over_vocabulary


class DraftGraphs(StepGraphs):
    """The kernels of a draft model or head: steps that follow the target model, and rounds.

    Call after `compute`: `stage_rounds`, `sample` for the first draft of each request, and `draft_next` for each
    further one.

    Args:
        model: the draft model or head.
        table: table of the slots.
        block_size: block size of the cache.
        vocab_size: vocabulary size of the model that it drafts for.
        rest: see `StepGraphs`.
    """

    def __init__(self, model: Model, table: GroupTable, block_size: int, vocab_size: int, **rest: Any) -> None:
        super().__init__(model, table=table, **rest)
        self._slots = table
        self._block_size, self._vocab_size = block_size, vocab_size
        decodes = self._sizes[GraphKind.DECODES].largest_first
        sizes = Sizes(min(size, table.idle_slot) for size in decodes)
        self._sizes |= {GraphKind.SAMPLES: sizes, GraphKind.ROUNDS: sizes, GraphKind.REPORTS: Sizes(())}

    def compute(self) -> None:
        """See `StepGraphs.compute`. Tokens that the host does not know yet are read from the model's samples."""
        self._slots.follow_tokens()
        super().compute()

    def stage_rounds(self, inputs: StepInputs, samples: SampleRows) -> None:
        """Send the inputs of the rounds: a step of one row per request, before the first round.

        Args:
            inputs: inputs of the positions before.
            samples: samples of the first drafts: rows of the latest step.
        """
        num = len(samples.rows_N)
        captured = None if self.is_eager else self._captured(GraphKind.ROUNDS, num)
        # A graph of samples reads hidden states from the memory where graphs write them.
        sample = self._captured(GraphKind.SAMPLES, num) if captured and self._current.compute else None
        fields = captured.fields if captured else self._buffer.inputs(num, num)
        sample_fields = self._buffer.samples(len(fields.views["positions"]))
        self._buffer.advance()
        self._upload.send(inputs, samples, fields, sample_fields, num_words=0)
        graphs = (captured.graph if captured else None, sample.graph if sample else None)
        self._staged = Staged(fields, sample_fields, *graphs, has_reports=False)

    def rewind(self, given_KE: Tensor, slots_E: Tensor, counts_E: Tensor) -> None:
        """Restart the rounds after the first wrong draft of each request; see `rewind_rows`."""
        step = self._current
        samples = step.samples.views
        numbers = [step.inputs.views["positions"], samples["sample_rows"], samples["sample_positions"]]
        numbers.append(samples["num_outputs"])
        rewind_rows(self._slots.sampled_KS, self._slots.drafts_KS, given_KE, slots_E, counts_E, numbers)

    def draft_next(self) -> Tensor:
        """Compute the last draft of each request, and draw the next one. The next call overwrites tokens_E."""
        step = self._current
        if step.compute is None:
            return self._round(step.inputs.views, step.samples.views, None)
        step.compute.replay()
        return self._tokens_N

    def capture(self, kind: GraphKind, size: int) -> None:
        """See `StepGraphs.capture`."""
        if kind is not GraphKind.ROUNDS:
            super().capture(kind, size)
            return
        fields, samples = self._buffer.inputs(size, size), self._buffer.samples(size)
        self._upload.send_idle(fields, samples, ())
        self._keep_graph(kind, size, fields, lambda: self._round(fields.views, samples.views, self._tokens_N[:size]))

    def _sample_idle(self, input_fields: Fields, sample_fields: Fields, *, changes_logits: bool) -> None:
        self.sample()
        num = len(sample_fields.views["sample_rows"])
        fields, samples = self._buffer.inputs(num, num), self._buffer.samples(num)
        self._upload.send_idle(fields, samples, ())
        self._round(fields.views, samples.views, None)
        zero = torch.zeros(1, dtype=torch.int64, device=self._stream.torch_device)
        self.rewind(zero[:, None], zero + self._slots.idle_slot, zero)

    def _sample_body(self, kind: GraphKind, fields: Fields, size: int) -> Callable[[], object]:
        self.features = self._features
        return super()._sample_body(kind, fields, size)

    def _round(self, views: Views, samples: Views, out_E: Tensor | None) -> Tensor:
        slots_E, (attention,) = views["request_slots"], self._attention
        context_lens_E = advance_rows(
            views["positions"],
            views[slot_mapping_name(0)],
            slots_E,
            self._slots.limits_S,
            self._slots.block_ids[0],
            self._block_size,
            [samples["sample_positions"], samples["num_outputs"]],
        )
        attention.plan_decodes(context_lens_E)
        hidden_ED = self._hidden_of(views)
        assert hidden_ED is not None, "what drafts has all of its layers here"
        features = [one_ED[: len(slots_E)] for one_ED in self._model_features]
        return self._drafted(samples, self._model.logits(hidden_ED), out_E, features)

    def _sampled(
        self,
        views: Views,
        logits_NV: Tensor,
        out_N: Tensor | None,
        memory: LogprobsMemory | None,
        raw_NV: Tensor | None = None,
    ) -> Tensor:
        features = [one_TD.index_select(0, views["sample_rows"]) for one_TD in self.features]
        return self._drafted(views, logits_NV, out_N, features)

    def _drafted(self, views: Views, logits_EV: Tensor, out_E: Tensor | None, features: list[Tensor]) -> Tensor:
        """Draw a token for each row, and keep it for the next round, with the features that a head reads."""
        tokens_E = self._drawn(views, over_vocabulary(self._model, logits_EV, self._vocab_size), out_E, None)
        self._slots.last_token_S.index_copy_(0, views["sample_slots"], tokens_E.clamp(min=0))
        if isinstance(self._model, DraftHead):
            self._model.inputs_XD[: len(tokens_E)].copy_(features[0])
        return tokens_E


class DeviceRounds:
    """See `octavo.worker_proc.runners.rounds.DraftRounds`.

    Args:
        model: the draft model or head.
        forward: its `Forward`, over its cache.
        graphs: graphs of `forward`.
        runner: runner of the model that it drafts for.
        table: table of the slots.
        stream: stream of the device.
        group: the cache group of the model whose blocks it uses.
        batch: batch of the requests.
    """

    def __init__(
        self,
        model: Model,
        forward: GraphForward,
        graphs: DraftGraphs,
        runner: CudaGraphRunner,
        table: GroupTable,
        stream: Stream,
        group: int,
        batch: BatchState,
    ) -> None:
        self._model, self.forward, self._graphs, self._table = model, forward, graphs, table
        self._runner = runner
        self._stream, self._group, self._batch = stream, group, batch
        self.waits_each_time = False
        """Wait for the device after each round, for example to measure the cost of that."""

    def use_model(self, model: Model | None) -> None:
        """Never called: graphs refer to the addresses of weights."""
        raise AssertionError("graphs compute with the model that they were captured with")

    def follow_samples(self, samples: Samples) -> None:
        """See `octavo.worker_proc.runners.rounds.DraftRounds`."""
        assert samples.draft_tokens is not None and self._runner.sampled_N is not None, "a step that verifies drafts"
        tokens_N = self._runner.sampled_N[: len(samples)].clamp(min=0)
        places_2N = upload_array(self._stream, np.stack([samples.draft_tokens.offsets_N, samples.slots_N]))
        self._table.sampled_KS.index_put_(places_2N.unbind(), tokens_N)

    def draft(
        self,
        slots_E: Ints,
        next_E: Ints,
        rows_E: Ints,
        limits_E: Ints,
        num_drafts: int,
        verified: Samples | None = None,
    ) -> Drafts | PendingDrafts:
        """See `octavo.worker_proc.runners.rounds.DraftRounds`. The next step may read the drafts on the device."""
        if not len(slots_E):
            return []
        draws_E = next_E + first_draw(self._model)
        num_outputs_E = draws_E - self._batch.columns.num_prompt_S[slots_E]
        inputs = draft_inputs(self._batch, self._group, slots_E, next_E - 1, np.ones_like(slots_E))
        inputs.token_ids_T = np.full_like(slots_E, PENDING)
        slots, limits = (upload_array(self._stream, numbers_E) for numbers_E in (slots_E, limits_E))
        self._table.limits_S.index_copy_(0, slots, limits)
        self.forward.await_buffer()
        self._graphs.stage_rounds(inputs, SampleRows(rows_E, slots_E, draws_E, num_outputs_E))
        if verified is not None and verified.draft_tokens is not None:
            given_KE, counts_E = verified.draft_tokens.by_request()
            self._graphs.rewind(upload_array(self._stream, given_KE), slots, upload_array(self._stream, counts_E))
        for place in range(num_drafts):
            tokens_N = self._graphs.draft_next() if place else self._graphs.sample().tokens_N
            # If the logits are NaN, the draft is token 0: as good as any.
            self._table.drafts_KS[place].index_copy_(0, slots, tokens_N[: len(slots_E)].clamp(min=0))
            if self.waits_each_time:
                self._stream.record_event().wait()
        drafts_KE = self._stream.download(self._table.drafts_KS[:num_drafts].index_select(1, slots))
        return PendingDrafts(slots_E, limits_E - next_E, drafts_KE, self.forward.end_rounds())
