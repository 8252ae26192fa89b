"""`StepUpload`: writes the metadata of a step to a host buffer, and sends it to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from octavo.kernels.paged_attention.gpu_prefixes import Prefixes
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.runners.cuda_graphs.metadata import (
    GraphAttention,
    SampleRows,
    fill_inputs,
    fill_samples,
    idle_step,
)
from octavo.worker_proc.runners.cuda_graphs.slot_table import GroupTable, SlotTable
from octavo.worker_proc.runners.cuda_graphs.step_buffer import Fields, StepBuffer

NO_SAMPLES = SampleRows(*(np.empty(0, np.int64) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class AttentionPlans:
    """The attention plans of a step in a host buffer."""

    num_tiles: Sequence[int]
    """Number of tiles in each cache group."""
    num_words: int
    """Words of all plans."""
    num_item_words: int
    """Words before the last plan's tiles."""


class StepUpload:
    """Sends steps through the host buffers, one after the other.

    Args:
        attention: attention of each cache group, followed by cross-attention; its plans are part of a step.
        table: table of the slots, whose changes are sent along.
        buffer: step buffers of the host and the device.
        has_states: whether the model has recurrent states.
    """

    def __init__(
        self,
        attention: Sequence[GraphAttention],
        table: SlotTable | GroupTable,
        buffer: StepBuffer,
        *,
        has_states: bool,
    ) -> None:
        self._attention = attention
        self._table = table
        self._buffer = buffer
        self._has_states = has_states

    def write_plans(self, inputs: StepInputs) -> AttentionPlans:
        """Take the next host buffer, and write the attention plans of a step to it.

        The step that was sent from this buffer must be over.
        """
        self._buffer.advance()
        words, start, end, num_tiles = self._buffer.attention_plan(), 0, 0, []
        slots_R = inputs.slots_T[inputs.query_starts[:-1]]
        for attention, labels in zip_longest(self._attention, self._table.segment_labels):
            plan = words[start : start + attention.layout.num_words]
            context_lens, prefixes = inputs.context_lens, None
            if labels is not None:
                prefixes = Prefixes(labels.labels_SX, slots_R)
            elif inputs.cross is not None:
                assert inputs.cross.context_lens_R is not None, "of cross-attention"
                context_lens = inputs.cross.context_lens_R
            counts = attention.write_plan(plan, inputs.query_starts, context_lens, prefixes)
            num_tiles.append(counts.num_tiles)
            end = start + counts.num_split_words
            start += attention.layout.num_words
        return AttentionPlans(num_tiles, start, end)

    def send(
        self, inputs: StepInputs, samples: SampleRows, input_fields: Fields, sample_fields: Fields, num_words: int
    ) -> None:
        """Fill the current host buffer, which has the attention plans, and copy it with the changes of the slots."""
        fill_inputs(self._buffer.arrays(input_fields), inputs, self._table.idle_slot)
        fill_samples(self._buffer.arrays(sample_fields), samples, self._table.idle_slot)
        lists, memory = self._table.memories
        self._buffer.send_changes(lists)
        self._buffer.send(input_fields, num_words, memory)

    def send_idle(self, input_fields: Fields, sample_fields: Fields, num_tiles: Sequence[int]) -> None:
        """Send one token of the idle slot, and padding. Attention will launch enough for `num_tiles` tiles, or nothing.

        All earlier work must be finished.
        """
        inputs = idle_step(self._table.idle_slot, len(self._table.block_ids), has_states=self._has_states)
        plans = self.write_plans(inputs)
        if num_tiles:
            for attention, num in zip(self._attention, num_tiles, strict=True):
                attention.launch_for(num)
        self.send(inputs, NO_SAMPLES, input_fields, sample_fields, plans.num_words)
