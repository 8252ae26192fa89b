"""`ItemRunner`: runs an encoder that computes one item at a time."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from octavo.protocol.media import EncoderInput
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.models.audio.item_encoder import ItemEncoder, Upload


class ItemRunner:
    """The `KindRunner` of an encoder that computes one item at a time.

    Args:
        tower: tower of the model.
        stream: stream of the device; `None` if the host computes.
    """

    def __init__(self, tower: ItemEncoder, stream: Stream | None) -> None:
        self.tower = tower
        self._upload: Upload = torch.from_numpy if stream is None else partial(upload_array, stream)

    def encode(self, inputs: Sequence[EncoderInput]) -> list[Tensor]:
        """See `octavo.worker_proc.media.encoder.KindRunner`."""
        with torch.inference_mode():
            return [self.tower.encode(item.tensors, self._upload) for item in inputs]

    def warm_up(self) -> None:
        """See `octavo.worker_proc.media.encoder.KindRunner`; does nothing."""
