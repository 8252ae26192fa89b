"""`ItemEncoder`: an encoder that computes one item at a time through torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.parameters import Parameters


class ItemEncoder(ABC):
    """Makes rows of prompts of items, one at a time, with operations that no native program has. Runs on the host.

    Args:
        parameters: of all parts, on the host.
        device: of the language model, to which rows go.
        host_bytes: what the largest item takes while it is computed.
    """

    def __init__(self, parameters: Parameters, device: torch.device, host_bytes: int) -> None:
        self.parameters, self.device = parameters, device
        self._is_beside_model, self._host_bytes = device == parameters.device, host_bytes
        self.dtype: torch.dtype = parameters.dtype
        """Of the language model."""
        self.pooling_head: None = None
        """See `octavo.worker_proc.models.base.Model.pooling_head`."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters in the memory of the language model."""
        return self.parameters.num_bytes if self._is_beside_model else 0

    @property
    def run_bytes(self) -> int:
        """What the largest item takes of that memory while it is computed."""
        return self._host_bytes if self._is_beside_model else 0

    @abstractmethod
    def encode(self, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """Return the rows of the prompt of an item, shape RD. Runs under `torch.inference_mode()`.

        Raises:
            ProtocolError: these are not tensors of the model's processor.
        """

    def arrange(self, rows_RD: Tensor, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """See `octavo.worker_proc.models.vision.tower.VisionTower.arrange`."""
        return rows_RD
