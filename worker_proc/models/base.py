"""What the worker needs from every model. Knows no architecture."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from torch import Tensor

from octavo.kernels.linear import Packer
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.paged_attention import AttentionShape
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.cache.groups import CacheGroup
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.models.parameters import Parameters


class Model(ABC):
    """A decoder: tokens in, hidden states and logits out. Keeps no state of any request.

    Callers run it under `torch.inference_mode()`.
    """

    def __init__(self, parameters: Parameters, num_layers: int, attention_shape: AttentionShape) -> None:
        self._parameters = parameters
        self.dtype = parameters.dtype
        self.device = parameters.device
        self.library: NativeLibrary | None = None
        """The library that computes its steps, and for which its weights are packed; None: torch."""
        self.cache_groups = (CacheGroup(attention_shape, tuple(range(num_layers))),)
        """All layers, by the block tables that they share."""

    @abstractmethod
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Return hidden_TD, after the final norm.

        Args:
            token_ids_T: int64.
            positions_T: int64.
            attention: planned for this step.
        """

    @abstractmethod
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits_RV in the model's dtype for rows of `forward`'s result."""

    @abstractmethod
    def prepare(self, max_model_len: int) -> None:
        """Compute the tables that requests of up to `max_model_len` tokens need."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters."""
        return self._parameters.num_bytes

    @property
    def parameters(self) -> Parameters:
        """All tensors and weights, for filling and packing them."""
        return self._parameters

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all parameters, for writing into them."""
        return self._parameters.named()

    def load_weights(self, weights: Iterable[tuple[str, Tensor | QuantizedMatrix]]) -> None:
        """Fill the parameters from a checkpoint with Hugging Face names.

        Raises:
            ConfigError: a tensor is missing, unexpected, or of another shape.
        """
        self._parameters.load(weights)

    def pack(self, packer: Packer, *, keeps_quantized: bool = False) -> None:
        """Pack the weights for the kernels: after loading, before the first step.

        Args:
            packer: of the model's device.
            keeps_quantized: whether weights that are quantized in the checkpoint stay so.
        """
        self._parameters.pack(packer, keeps_quantized=keeps_quantized)
