"""`ItemRunner`: runs an encoder that computes one item at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.protocol.media import EncoderInput
from octavo.worker_proc.models.audio.item_encoder import ItemEncoder


class ItemRunner:
    """Stands in the place of a `TowerRunner`.

    Args:
        tower: of the model.
    """

    def __init__(self, tower: ItemEncoder) -> None:
        self.tower = tower

    def encode(self, inputs: Sequence[EncoderInput]) -> list[Tensor]:
        """Return the rows of each item.

        Raises:
            ProtocolError: an item has not the tensors of the model's processor.
        """
        with torch.inference_mode():
            return [self.tower.encode(item.tensors) for item in inputs]
