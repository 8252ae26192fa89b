"""The metadata of a step: one buffer on the device, two on the host, and one copy per step.

The attention plans have a fixed offset, because the same objects read them in all steps. The fields of a step end where
the plans begin; the changes of slots come before the fields:

    ... unused | changes | fields of the step | attention plans | unused ...
                         ^ depends on the size ^ fixed
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.runners.cuda_graphs.metadata import Arrays, StepSize, Views, fields_of
from octavo.worker_proc.runners.cuda_graphs.packed import Field, PackedLayout
from octavo.worker_proc.runners.cuda_graphs.slot_memory import Places, SlotMemory, Words

NUM_HOST_BUFFERS = 2
"""Steps that may be in flight: a buffer is reused when its step is over."""
MAX_PACKED_CHANGES = 4096
"""Changed words of slots that fit into a step's copy; more are copied separately."""

_WORD_BYTES = 4


class StepBuffer:
    """The buffers of all steps.

    Args:
        stream: of the device.
        max_size: of any step.
        num_attention_words: of the attention plans of all cache groups together.
        num_groups: KV cache groups.
    """

    def __init__(self, stream: Stream, max_size: StepSize, num_attention_words: int, num_groups: int = 1) -> None:
        self._stream = stream
        self._num_groups = num_groups
        self._plan_start = changes_layout(MAX_PACKED_CHANGES).num_bytes + self._new_layout(max_size).num_bytes
        num_bytes = self._plan_start + num_attention_words * _WORD_BYTES
        self._device_B = torch.zeros(num_bytes, dtype=torch.uint8, device=stream.torch_device)
        self._host_buffers = [stream.host_buffer(num_bytes) for _ in range(NUM_HOST_BUFFERS)]
        self._plans = [host_B[self._plan_start :].view(torch.int32).numpy() for host_B in self._host_buffers]
        self._index = 0
        # Cached for decodes only, which have few sizes.
        self._layouts: dict[StepSize, PackedLayout] = {}
        self._arrays: dict[tuple[StepSize, int], Arrays] = {}
        self._views: dict[StepSize, Views] = {}

    @property
    def attention_plan_W(self) -> Tensor:
        """The attention plans on the device; int32."""
        return self._device_B[self._plan_start :].view(torch.int32)

    def advance(self) -> None:
        """Begin the next step, in the host buffer of the step before the last one, which must be over."""
        self._index = (self._index + 1) % NUM_HOST_BUFFERS

    def attention_plan(self) -> npt.NDArray[np.int32]:
        """Return the attention plans in the current host buffer."""
        return self._plans[self._index]

    def arrays(self, size: StepSize) -> Arrays:
        """Return the fields of the step on the host."""
        if (arrays := self._arrays.get((size, self._index))) is None:
            arrays = self._layout(size).host_views(self._fields_B(size, self._host_B))
            if size.is_decode:
                self._arrays[size, self._index] = arrays
        return arrays

    def views(self, size: StepSize) -> Views:
        """Return the fields of the step on the device."""
        if (views := self._views.get(size)) is None:
            views = self._layout(size).views(self._fields_B(size, self._device_B))
            if size.is_decode:
                self._views[size] = views
        return views

    def send(self, size: StepSize, num_attention_words: int, memory: SlotMemory) -> None:
        """Copy the step to the device: its fields, the first words of its attention plans, and the changes of slots."""
        self._send_rows(memory)
        places, words = memory.take_changes()
        if len(places) > MAX_PACKED_CHANGES:
            self._apply_alone(memory, places, words)
            places, words = places[:0], words[:0]
        fields_start = self._plan_start - self._layout(size).num_bytes
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
            self._apply_alone(memory, places, words)

    def _apply_alone(self, memory: SlotMemory, places: Places, words: Words) -> None:
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

    def _fields_B(self, size: StepSize, buffer_B: Tensor) -> Tensor:
        return buffer_B[self._plan_start - self._layout(size).num_bytes : self._plan_start]

    def _layout(self, size: StepSize) -> PackedLayout:
        if (layout := self._layouts.get(size)) is None:
            layout = self._new_layout(size)
            if size.is_decode:
                self._layouts[size] = layout
        return layout

    def _new_layout(self, size: StepSize) -> PackedLayout:
        return PackedLayout(fields_of(size, self._num_groups))


def changes_layout(num_words: int) -> PackedLayout:
    """Return the layout of changes of slots in a buffer."""
    return PackedLayout([Field("places", torch.int64, num_words), Field("words", torch.int32, num_words)])
