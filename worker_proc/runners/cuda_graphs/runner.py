"""The runner of a GPU: keeps the device's copy of the batch up to date, and has its graphs compute each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.kernels.logprobs import RowLogprobs
from octavo.kernels.sample import rule_out_text
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import NO_TOKEN, StepPlan
from octavo.worker_proc.batch.columns import Trait
from octavo.worker_proc.batch.inputs import Ints, StepInputs
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import DeviceEvent, Stream, upload_array
from octavo.worker_proc.executor.runner import ChangeLogits, Rounds, SampledRow, Samples, WaitForCommand
from octavo.worker_proc.models.base import Model, StepAngles
from octavo.worker_proc.models.given_rows import GivenRows
from octavo.worker_proc.runners.cuda_graphs.cross_table import CrossTable
from octavo.worker_proc.runners.cuda_graphs.graphs import StepGraphs
from octavo.worker_proc.runners.cuda_graphs.logprobs import DevicePromptLogprobs, LogprobReporter, SampleLogprobs
from octavo.worker_proc.runners.cuda_graphs.metadata import SampleRows, StepSize
from octavo.worker_proc.runners.cuda_graphs.sizes import idle_sizes
from octavo.worker_proc.runners.cuda_graphs.slot_table import SlotTable
from octavo.worker_proc.runners.cuda_graphs.step_buffer import NUM_HOST_BUFFERS
from octavo.worker_proc.runners.cuda_graphs.upload import NO_SAMPLES
from octavo.worker_proc.runners.host import HostSamples
from octavo.worker_proc.sampling.columns import is_reported_with_draw
from octavo.worker_proc.sampling.state import LARGEST


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSamples:
    """The `PendingSamples` of a GPU, in host buffers."""

    tokens_N: Tensor
    places: Sequence[int]
    """Indices of the samples that report logprobs."""
    specs: Sequence[SamplingSpec]
    """Sampling specs of their requests."""
    reported: SampleLogprobs | None

    def token_ids(self) -> list[int]:
        """See `octavo.worker_proc.executor.runner.PendingSamples`."""
        token_ids: list[int] = self.tokens_N.tolist()
        return token_ids

    def logprobs(self) -> list[RowLogprobs | None] | None:
        """See `octavo.worker_proc.executor.runner.PendingSamples`."""
        if self.reported is None:
            return None
        rows: list[RowLogprobs | None] = [None] * len(self.tokens_N)
        for index, (place, spec) in enumerate(zip(self.places, self.specs, strict=True)):
            rows[place] = self.reported.row(index, spec)
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """The `PendingRows` of a GPU, in a host buffer."""

    hidden_ND: Tensor

    def rows(self) -> npt.NDArray[np.float32]:
        """See `octavo.worker_proc.executor.runner.PendingRows`."""
        rows: npt.NDArray[np.float32] = self.hidden_ND.numpy()
        return rows


class CudaGraphRunner:
    """A `Runner` whose device computes asynchronously.

    Args:
        table: the device's copy of the batch.
        graphs: computes the steps.
        stream: stream of the device.
        cache_bytes: bytes of keys, values and states.
        cache_buffers: buffers of keys and values.
        max_size: largest size of a step.
        given_rows: `given_rows` of the model.
        step_angles: `step_angles` of the model.
        cross: cross-attention cache of a model that has one.
        changes_logits: whether `sample` may be given `change_logits`.
        state_buffers: buffers of recurrent states.
    """

    max_in_flight = NUM_HOST_BUFFERS
    masks_each_draw = False
    reads_block_tables = False
    programs = None

    def __init__(
        self,
        table: SlotTable,
        graphs: StepGraphs,
        stream: Stream,
        cache_bytes: int,
        cache_buffers: Sequence[Tensor],
        max_size: StepSize,
        given_rows: GivenRows | None = None,
        step_angles: StepAngles | None = None,
        cross: CrossTable | None = None,
        *,
        changes_logits: bool = False,
        state_buffers: Sequence[Tensor] = (),
    ) -> None:
        self.graphs = graphs
        self.state_buffers = state_buffers
        self.cache_bytes = cache_bytes
        self.cache_buffers = cache_buffers
        self.table = self._table = table
        self.sampled_N: Tensor | None = None
        """Tokens of the last step whose draws were made at once, on the device; padding included."""
        self.stream = self._stream = stream
        self._reporter = LogprobReporter(graphs, stream)
        self._idle_sizes = idle_sizes(max_size)
        self.max_logits = max_size.num_samples
        self._given_rows, self._step_angles, self._cross = given_rows, step_angles, cross
        self._changes_logits = changes_logits

    def warm_up(self) -> int:
        """See `octavo.worker_proc.executor.runner.Runner`: compiles all kernels and captures all graphs."""
        for size in self._idle_sizes:
            self.graphs.launch_idle(size, changes_logits=self._changes_logits)
        if self.graphs.has_samples:
            self._reporter.warm_up(self._table)
        return self.graphs.capture_all()

    def use_model(self, model: Model | None) -> None:
        """Never called: graphs refer to the addresses of weights, so weights are overwritten in place."""
        raise AssertionError("graphs compute with the model that they were captured with")

    def on_plan(self, plan: StepPlan, batch: BatchState) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`; a longer list than the table has room for makes it grow."""
        states = [batch.rows[admitted.slot].sampling for admitted in plan.admitted]
        widths = self._table.widths
        num_groups = widths.num_groups  # state slots, if there are any, come with each step
        for state in states:
            widths = widths.holding(state)
        if widths != self._table.widths:
            self.graphs.send_changes()
            self._table.grow(widths.sampling)
        for admitted, state in zip(plan.admitted, states, strict=True):
            self._table.admit(admitted.slot, state, admitted.block_ids[:num_groups], admitted.adapter_slot)
        for appended in plan.appended:
            num_blocks = batch.rows[appended.slot].num_blocks[:num_groups]
            block_ids = appended.block_ids[:num_groups]
            starts = [num - len(ids) for num, ids in zip(num_blocks, block_ids, strict=True)]
            self._table.append_blocks(appended.slot, starts, block_ids)

    def run(self, inputs: StepInputs, samples: Samples) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        rows = NO_SAMPLES  # if there is no room for all samples, each round stages its own
        if len(samples) <= self.max_logits:
            rows = SampleRows(samples.indices_N, samples.slots_N, samples.positions_N, samples.num_outputs_N)
        specs = _reporting_specs(samples)
        self.graphs.stage(inputs, rows, has_reports=bool(specs) and all(map(is_reported_with_draw, specs)))
        if self._given_rows is not None:
            self._given_rows.send(inputs.given, self._stream)
        if self._step_angles is not None and inputs.axes_AT is not None:
            self._step_angles.put(inputs.axes_AT, self._stream)
        if self._cross is not None and inputs.cross is not None:
            self._cross.put(inputs.cross, self._stream)
        self.graphs.compute()

    def prompt_logprobs(
        self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int, position: int
    ) -> DevicePromptLogprobs:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self._reporter.of_prompt(spec, token_ids, first_row, position)

    def sample(
        self,
        samples: Samples,
        *,
        has_masks: bool,
        change_logits: ChangeLogits | None = None,
        rounds: Rounds | None = None,
    ) -> DeviceSamples | HostSamples:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        if samples.with_trait(Trait.HAS_TIMESTAMPS):
            change_logits = partial(self._rule_out_text, change_logits)
        if rounds is not None:
            return self._sample_in_rounds(samples, rounds, has_masks=has_masks, change_logits=change_logits)
        masked = self._bind(samples, has_masks=has_masks)
        places, specs = samples.with_trait(Trait.REPORTS_LOGPROBS), _reporting_specs(samples)
        is_listed = not all(map(is_reported_with_draw, specs))
        logits_NV = raw_NV = reported = None
        if is_listed or change_logits is not None:
            logits_NV = raw_NV = self.graphs.logits()
        if logits_NV is not None and change_logits is not None:
            raw_NV = logits_NV.clone() if places else None
            logits_NV[: len(samples)] = change_logits(logits_NV[: len(samples)], samples)
        if logits_NV is not None and raw_NV is not None and is_listed:
            reported = self._reporter.before_sampling(samples, self._table, raw_NV, logits_NV)
        sampled = self.graphs.sample(logits_NV, raw_NV)
        self.sampled_N = sampled.tokens_N
        logprobs = None
        if reported is not None:
            logprobs = self._reporter.after_sampling(reported, sampled.tokens_N)
        elif sampled.logprobs is not None:
            logprobs = self._reporter.of_draws(sampled.logprobs.first(len(samples)), places)
        tokens_N = self._stream.download(sampled.tokens_N[: len(samples)])
        self._unmask(masked)
        return DeviceSamples(tokens_N, places, specs, logprobs)

    def _sample_in_rounds(
        self, samples: Samples, rounds: Rounds, *, has_masks: bool, change_logits: ChangeLogits | None
    ) -> HostSamples:
        """Sample round by round. Blocks until the device has drawn each round."""
        logits_NV = self.graphs.logits() if len(samples) <= self.max_logits else None
        token_ids = [NO_TOKEN] * len(samples)
        rows: list[RowLogprobs | None] = [None] * len(samples)
        while len(places_M := rounds.places_M):
            part = samples.select(places_M)
            masked = self._bind(part, has_masks=has_masks)
            if logits_NV is None:
                logits_MV = self._reporter.logits_of(part.indices_N)
            else:
                logits_MV = logits_NV.index_select(0, upload_array(self._stream, places_M))
            drawn_from_MV = logits_MV
            if change_logits is not None:
                drawn_from_MV = change_logits(logits_MV, part)
            reporting, specs = part.with_trait(Trait.REPORTS_LOGPROBS), _reporting_specs(part)
            reported = None
            if reporting:
                reported = self._reporter.before_sampling(part, self._table, logits_MV, drawn_from_MV)
            drawn = SampleRows(part.indices_N, part.slots_N, part.positions_N, part.num_outputs_N)
            tokens_M = self.graphs.sample_at(drawn, drawn_from_MV)
            logprobs = self._reporter.after_sampling(reported, tokens_M) if reported else None
            host_M = self._stream.download(tokens_M)
            self._stream.record_event().wait()
            self._unmask(masked)
            for place, token_id in zip(places_M.tolist(), host_M.tolist(), strict=True):
                token_ids[place] = token_id
            if logprobs is not None:
                for index, (place, spec) in enumerate(zip(places_M[reporting].tolist(), specs, strict=True)):
                    rows[place] = logprobs.row(index, spec)
            rounds.record(host_M.tolist())
        return HostSamples(token_ids, rows if any(row is not None for row in rows) else None)

    def hidden(self, rows: Ints) -> DeviceRows:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return DeviceRows(self._stream.download(self._reporter.logits_of(rows)))

    @property
    def features(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.executor.runner.Runner`; on the device."""
        return self.graphs.features

    def record_event(self) -> DeviceEvent:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self._stream.record_event()

    def after_step(self, num_tokens: int) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`; does nothing."""

    def join_step(self) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`; engines on GPUs do not divide experts."""

    def on_idle(self, wait_for_command: WaitForCommand) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`; does nothing."""

    def _bind(self, samples: Samples, *, has_masks: bool) -> list[SampledRow]:
        """Send masks and completed bad words to the device before it samples. Return the samples that have a mask.

        Without timestamps, the mask of a second token is known before the first token is.
        """
        for place in samples.with_trait(Trait.HAS_SPEECH_RULES | Trait.HAS_TIMESTAMPS):
            speech, slot = samples[place].row.sampling.speech, int(samples.slots_N[place])
            assert speech is not None, "a request with rules"
            if samples.traits_N[place] & int(Trait.HAS_TIMESTAMPS):
                self._table.set_mask(slot, speech.allowed_W)
            elif samples.num_outputs_N[place] == 1:
                self._table.set_mask(slot, speech.after_first_W)
        for place in samples.with_trait(Trait.HAS_LONG_BAD_WORDS):
            row = samples[place].row
            self._table.set_bad_ids(row.slot, row.sampling)
        masked = []
        if has_masks:
            masked = [sample for sample in samples if sample.row.sampling.has_own_mask]
        for sample in masked:
            self._table.set_mask(sample.row.slot, sample.row.sampling.allowed_W)
        self.graphs.send_changes()
        return masked

    def _rule_out_text(self, then: ChangeLogits | None, logits_RV: Tensor, samples: Samples) -> Tensor:
        """Apply the timestamp rule, after everything else that changes logits."""
        if then is not None:
            logits_RV = then(logits_RV, samples)
        if places := samples.with_trait(Trait.HAS_TIMESTAMPS):
            columns = np.stack([places, samples.slots_N[places], samples.num_outputs_N[places]])
            rows_M, slots_M, num_outputs_M = upload_array(self._stream, columns).unbind()
            first = samples[places[0]].row.sampling.first_timestamp  # the same for all requests of the model
            rule_out_text(
                logits_RV, self._table.requests, rows_M, slots_M, num_outputs_M, first_timestamp=first, largest=LARGEST
            )
        return logits_RV

    def _unmask(self, masked: Sequence[SampledRow]) -> None:
        for sample in masked:
            self._table.set_mask(sample.row.slot, sample.row.sampling.always_allowed_W)


def _reporting_specs(samples: Samples) -> list[SamplingSpec]:
    return [samples[place].row.sampling.spec for place in samples.with_trait(Trait.REPORTS_LOGPROBS)]
