"""`ItemEncoder`: an encoder that computes one item at a time through torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.parameters import Parameters

Upload: TypeAlias = Callable[[npt.NDArray[np.float32]], Tensor]


class ItemEncoder(ABC):
    """Encodes items to prompt rows, one at a time, with operations that native programs lack.

    Args:
        parameters: parameters of all parts.
        run_bytes: bytes that the largest item takes while it is computed.
    """

    def __init__(self, parameters: Parameters, run_bytes: int) -> None:
        self.parameters, self.device, self.run_bytes = parameters, parameters.device, run_bytes
        self.dtype: torch.dtype = parameters.dtype
        """Type of the language model."""
        self.pooling_head: None = None
        """See `octavo.worker_proc.models.base.Model.pooling_head`."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.parameters.num_bytes

    @abstractmethod
    def encode(self, tensors: Mapping[str, MediaTensor], upload: Upload) -> Tensor:
        """Return the prompt rows of an item, shape RD. Runs under `torch.inference_mode()`.

        Args:
            tensors: tensors of the item.
            upload: copies an array to the device.

        Raises:
            ProtocolError: these are not tensors of the model's processor.
        """

    def arrange(self, rows_RD: Tensor, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """See `octavo.worker_proc.models.vision.tower.MediaTower.arrange`."""
        return rows_RD
