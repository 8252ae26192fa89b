"""The metadata of a step: one buffer on the device, two on the host, and one copy per step.

Attention plans have a fixed offset, because the same objects read them in all steps. Samples have one too, because a
sampling graph serves steps with any number of tokens. The inputs of a step end where the samples begin, and the changes
of slots come before the inputs:

    ... unused | changes | inputs of the step | samples | attention plans | unused ...
                         ^ depends on the size ^ fixed   ^ fixed
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.runners.cuda_graphs.metadata import Arrays, StepSize, Views, input_fields, sample_fields
from octavo.worker_proc.runners.cuda_graphs.packed import Field, PackedLayout
from octavo.worker_proc.runners.cuda_graphs.slot_memory import Places, SlotMemory, Words

NUM_HOST_BUFFERS = 2
"""Number of steps in flight: a buffer is reused when its step is over."""
MAX_PACKED_CHANGES = 4096
"""Limit of changed slot words in a step's copy; more are copied separately."""

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """Inputs or samples of steps of one size."""

    start: int
    """Offset in the buffers."""
    views: Views
    """Views on the device."""
    host_arrays: Sequence[Arrays]
    """Arrays in each host buffer."""


class StepBuffer:
    """The buffers of all steps.

    Args:
        stream: stream of the device.
        max_size: largest size of a step.
        num_attention_words: size of the attention plans of all cache groups together, in words.
        num_groups: KV cache groups.
        has_states: whether the model has recurrent states.
    """

    def __init__(
        self,
        stream: Stream,
        max_size: StepSize,
        num_attention_words: int,
        num_groups: int = 1,
        *,
        has_states: bool = False,
    ) -> None:
        self._stream = stream
        self._num_groups, self._has_states = num_groups, has_states
        most_inputs = self._inputs_layout(max_size.num_tokens, max_size.num_requests)
        self._samples_start = changes_layout(MAX_PACKED_CHANGES).num_bytes + most_inputs.num_bytes
        self._plan_start = self._samples_start + PackedLayout(sample_fields(max_size.num_samples)).num_bytes
        num_bytes = self._plan_start + num_attention_words * _WORD_BYTES
        self._device_B = torch.zeros(num_bytes, dtype=torch.uint8, device=stream.torch_device)
        self._host_buffers = [stream.host_buffer(num_bytes) for _ in range(NUM_HOST_BUFFERS)]
        self._plans = [host_B[self._plan_start :].view(torch.int32).numpy() for host_B in self._host_buffers]
        self._index = 0

    @property
    def attention_plan_W(self) -> Tensor:
        """The attention plans on the device; int32."""
        return self._device_B[self._plan_start :].view(torch.int32)

    def advance(self) -> None:
        """Begin the next step, in the host buffer of the step before the previous one, which must be over."""
        self._index = (self._index + 1) % NUM_HOST_BUFFERS

    def attention_plan(self) -> npt.NDArray[np.int32]:
        """Return the attention plans in the current host buffer."""
        return self._plans[self._index]

    def inputs(self, num_tokens: int, num_requests: int) -> Fields:
        """Return the fields for the inputs of steps of a size."""
        layout = self._inputs_layout(num_tokens, num_requests)
        return self._fields(layout, self._samples_start - layout.num_bytes)

    def samples(self, num_samples: int) -> Fields:
        """Return the fields for this many samples."""
        return self._fields(PackedLayout(sample_fields(num_samples)), self._samples_start)

    def arrays(self, fields: Fields) -> Arrays:
        """Return fields in the current host buffer."""
        return fields.host_arrays[self._index]

    def send(self, inputs: Fields, num_attention_words: int, memory: SlotMemory) -> None:
        """Copy the step to the device: its fields, the first words of its attention plans, and the changes of slots."""
        self._send_rows(memory)
        places, words = memory.take_changes()
        if len(places) > MAX_PACKED_CHANGES:
            self._upload_changes(memory, places, words)
            places, words = places[:0], words[:0]
        fields_start = inputs.start
        end = self._plan_start + num_attention_words * _WORD_BYTES
        if not len(places):
            self._stream.upload(self._device_B[fields_start:end], self._host_B[fields_start:end])
            return
        layout = changes_layout(len(places))
        start = fields_start - layout.num_bytes
        packed = layout.host_views(self._host_B[start:fields_start])
        packed["places"][:], packed["words"][:] = places, words
        self._stream.upload(self._device_B[start:end], self._host_B[start:end])
        changes = layout.views(self._device_B[start:fields_start])
        memory.apply(changes["places"], changes["words"])

    def send_changes(self, memory: SlotMemory) -> None:
        """Copy the changes of slots now, without a step."""
        self._send_rows(memory)
        places, words = memory.take_changes()
        if len(places):
            self._upload_changes(memory, places, words)

    def _upload_changes(self, memory: SlotMemory, places: Places, words: Words) -> None:
        layout = changes_layout(len(places))
        host_B = self._stream.host_buffer(layout.num_bytes)
        arrays = layout.host_views(host_B)
        arrays["places"][:], arrays["words"][:] = places, words
        device_B = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._stream.torch_device)
        self._stream.upload(device_B, host_B)
        changes = layout.views(device_B)
        memory.apply(changes["places"], changes["words"])

    def _send_rows(self, memory: SlotMemory) -> None:
        """Copy changed rows: one copy and one launch for all rows of a column."""
        for name, rows in memory.take_rows().items():
            target_SW = memory.tensor(name)
            num_words = len(rows) * target_SW.shape[1]
            layout = PackedLayout([Field("slots", torch.int64, len(rows)), Field("rows", torch.int32, num_words)])
            host_B = self._stream.host_buffer(layout.num_bytes)
            arrays = layout.host_views(host_B)
            arrays["slots"][:] = list(rows)
            np.concatenate(list(rows.values()), out=arrays["rows"])
            device_B = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._stream.torch_device)
            self._stream.upload(device_B, host_B)
            views = layout.views(device_B)
            target_SW.index_copy_(0, views["slots"], views["rows"].view(len(rows), -1))

    @property
    def _host_B(self) -> Tensor:
        return self._host_buffers[self._index]

    def _inputs_layout(self, num_tokens: int, num_requests: int) -> PackedLayout:
        return PackedLayout(input_fields(num_tokens, num_requests, self._num_groups, has_states=self._has_states))

    def _fields(self, layout: PackedLayout, start: int) -> Fields:
        end = start + layout.num_bytes
        arrays = [layout.host_views(host_B[start:end]) for host_B in self._host_buffers]
        return Fields(start, layout.views(self._device_B[start:end]), arrays)


def changes_layout(num_words: int) -> PackedLayout:
    """Return the layout of changes of slots in a buffer."""
    return PackedLayout([Field("places", torch.int64, num_words), Field("words", torch.int32, num_words)])
