"""The runner of a GPU: keeps the device's copy of the batch up to date, and has each step computed by its graphs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from octavo.kernels.logprobs import RowLogprobs
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import StepPlan
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import DeviceEvent, Stream
from octavo.worker_proc.executor.runner import ChangeLogits, SampledRow, WaitForCommand
from octavo.worker_proc.runners.cuda_graphs.graphs import StepGraphs
from octavo.worker_proc.runners.cuda_graphs.logprobs import DevicePromptLogprobs, LogprobReporter, SampleLogprobs
from octavo.worker_proc.runners.cuda_graphs.metadata import SampleRows
from octavo.worker_proc.runners.cuda_graphs.slot_table import SlotTable
from octavo.worker_proc.runners.cuda_graphs.step_buffer import NUM_HOST_BUFFERS

IDLE_MS = 20
"""Without a command for this long the engine has nothing to do, and graphs may be captured."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSamples:
    """The `PendingSamples` of a GPU, in host buffers."""

    samples: Sequence[SampledRow]
    tokens_N: Tensor
    reported: SampleLogprobs | None

    def token_ids(self) -> list[int]:
        """See `octavo.worker_proc.executor.runner.PendingSamples`."""
        token_ids: list[int] = self.tokens_N.tolist()
        return token_ids

    def logprobs(self) -> list[RowLogprobs | None] | None:
        """See `octavo.worker_proc.executor.runner.PendingSamples`."""
        if self.reported is None:
            return None
        rows: list[RowLogprobs | None] = []
        place = 0
        for sample in self.samples:
            spec = sample.row.sampling.spec
            rows.append(None if spec.logprobs is None else self.reported.row(place, spec))
            place += spec.logprobs is not None
        return rows


class CudaGraphRunner:
    """A `Runner` whose device computes while the host goes on.

    Args:
        table: the batch as the device knows it.
        graphs: compute.
        stream: of the device.
        cache_bytes: of keys and values.
    """

    max_in_flight = NUM_HOST_BUFFERS
    reads_block_tables = False
    programs = None

    def __init__(self, table: SlotTable, graphs: StepGraphs, stream: Stream, cache_bytes: int) -> None:
        self.graphs = graphs
        self.cache_bytes = cache_bytes
        self._table = table
        self._stream = stream
        self._reporter = LogprobReporter(graphs, stream)

    def prepare(self) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`: captures the graphs of all sizes."""
        for size in self.graphs.uncaptured:
            self.graphs.capture(size)

    def on_plan(self, plan: StepPlan, batch: BatchState) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`; a longer list than the table has room for makes it grow."""
        states = [batch.rows[admitted.slot].sampling for admitted in plan.admitted]
        widths = self._table.widths
        for state in states:
            widths = widths.holding(state)
        if widths != self._table.widths:
            self.graphs.send_changes()
            self._table = self._table.widened(widths)
            self.graphs.replace_table(self._table)
        for admitted, state in zip(plan.admitted, states, strict=True):
            self._table.admit(admitted.slot, state, admitted.block_ids)
        for appended in plan.appended:
            num_blocks = batch.rows[appended.slot].num_blocks
            starts = [num - len(block_ids) for num, block_ids in zip(num_blocks, appended.block_ids, strict=True)]
            self._table.append_blocks(appended.slot, starts, appended.block_ids)

    def run(self, inputs: StepInputs, samples: Sequence[SampledRow]) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        rows_N = np.array([sample.index for sample in samples], dtype=np.int64)
        positions_N = np.array([sample.position for sample in samples], dtype=np.int64)
        num_outputs_N = np.array([sample.num_outputs for sample in samples], dtype=np.int64)
        self.graphs.stage(inputs, SampleRows(rows_N, inputs.slots_T[rows_N], positions_N, num_outputs_N))
        self.graphs.compute()

    def prompt_logprobs(self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int) -> DevicePromptLogprobs:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self._reporter.of_prompt(spec, token_ids, first_row)

    def sample(
        self, samples: Sequence[SampledRow], *, has_masks: bool, change_logits: ChangeLogits | None = None
    ) -> DeviceSamples:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        masked = self._bind(samples, has_masks=has_masks)
        changed_NV = None if change_logits is None else self.graphs.changed_logits(change_logits, len(samples))
        reported = self._reporter.before_sampling(samples, self._table, changed_NV)
        on_device_N = self.graphs.sample(changed_NV)
        logprobs = self._reporter.after_sampling(reported, on_device_N) if reported else None
        tokens_N = self._stream.download(on_device_N[: len(samples)])
        for sample in masked:
            self._table.set_mask(sample.row.slot, sample.row.sampling.always_allowed_W)
        return DeviceSamples(samples, tokens_N, logprobs)

    def record_event(self) -> DeviceEvent:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self._stream.record_event()

    def after_step(self, num_tokens: int) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`; does nothing."""

    def on_idle(self, wait_for_command: WaitForCommand) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`: captures again the graphs that were dropped."""
        while (sizes := self.graphs.uncaptured) and not wait_for_command(IDLE_MS):
            self.graphs.capture(sizes[0])

    def _bind(self, samples: Sequence[SampledRow], *, has_masks: bool) -> list[SampledRow]:
        """Send masks and completed bad words to the device before it samples; returns the samples with a mask."""
        masked = []
        for sample in samples:
            state = sample.row.sampling
            if state.bad_words is not None and state.bad_words.depends_on_output:
                self._table.set_bad_ids(sample.row.slot, state)
            if has_masks and state.allowed_W is not state.always_allowed_W:
                masked.append(sample)
                self._table.set_mask(sample.row.slot, state.allowed_W)
        self.graphs.send_changes()
        return masked
