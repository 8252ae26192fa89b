"""What a step tells the device, in one piece of memory there and in others like it on the host, and one copy of it.

The plan of the attention lies at a place of its own, because one object reads it in all steps; the fields of a step end
where it begins, and before them come the changes of the slots:

    ... unused | changes | fields of the step | plan of the attention | unused ...
                         ^ depends on the size ^ always here
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.pipeline.metadata import Arrays, StepSize, Views, fields_of
from octavo.worker_proc.pipeline.packed import Field, PackedLayout
from octavo.worker_proc.pipeline.slot_memory import Places, SlotMemory, Words

NUM_HOST_BUFFERS = 2
"""As many steps may be in flight: a buffer is written again when the step that it was written for is over."""
MAX_PACKED_CHANGES = 4096
"""Changed words of the slots that travel with a step; more go in a copy of their own."""

_WORD_BYTES = 4


class StepBuffer:
    """The memory of all steps, on the device and twice on the host.

    Args:
        stream: of the device.
        max_size: of any step.
        num_plan_words: of the attention's plan.
    """

    def __init__(self, stream: Stream, max_size: StepSize, num_plan_words: int) -> None:
        self._stream = stream
        self._plan_start = changes_layout(MAX_PACKED_CHANGES).num_bytes + _layout(max_size).num_bytes
        num_bytes = self._plan_start + num_plan_words * _WORD_BYTES
        self._device_B = torch.zeros(num_bytes, dtype=torch.uint8, device=stream.torch_device)
        self._host_buffers = [stream.host_buffer(num_bytes) for _ in range(NUM_HOST_BUFFERS)]
        self._plans = [host_B[self._plan_start :].view(torch.int32).numpy() for host_B in self._host_buffers]
        self._index = 0
        # Of decodes alone, whose sizes are few.
        self._layouts: dict[StepSize, PackedLayout] = {}
        self._arrays: dict[tuple[StepSize, int], Arrays] = {}
        self._views: dict[StepSize, Views] = {}

    @property
    def plan_words_W(self) -> Tensor:
        """The attention's plan on the device; int32."""
        return self._device_B[self._plan_start :].view(torch.int32)

    def advance(self) -> None:
        """Begin the next step, in the host buffer of the step before the last, which must be over."""
        self._index = (self._index + 1) % NUM_HOST_BUFFERS

    def plan_words(self) -> npt.NDArray[np.int32]:
        """Return the place of the attention's plan on the host."""
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

    def send(self, size: StepSize, num_plan_words: int, memory: SlotMemory) -> None:
        """Copy the step to the device, its plan's first words, and what has changed in the memory of the slots."""
        places, words = memory.take_changes()
        if len(places) > MAX_PACKED_CHANGES:
            self._apply_alone(memory, places, words)
            places, words = places[:0], words[:0]
        fields_start = self._plan_start - self._layout(size).num_bytes
        end = self._plan_start + num_plan_words * _WORD_BYTES
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
        """Copy what has changed in the memory of the slots, now and alone."""
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

    @property
    def _host_B(self) -> Tensor:
        return self._host_buffers[self._index]

    def _fields_B(self, size: StepSize, buffer_B: Tensor) -> Tensor:
        return buffer_B[self._plan_start - self._layout(size).num_bytes : self._plan_start]

    def _layout(self, size: StepSize) -> PackedLayout:
        if (layout := self._layouts.get(size)) is None:
            layout = _layout(size)
            if size.is_decode:
                self._layouts[size] = layout
        return layout


def changes_layout(num_words: int) -> PackedLayout:
    """Return where changes of the slots lie in a buffer."""
    return PackedLayout([Field("places", torch.int64, num_words), Field("words", torch.int32, num_words)])


def _layout(size: StepSize) -> PackedLayout:
    return PackedLayout(fields_of(size))
