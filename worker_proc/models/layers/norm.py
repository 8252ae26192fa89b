"""Normalization layers, and the creation of their parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.add_rms_norm import add_rms_norm
from octavo.kernels.layer_norm import layer_norm
from octavo.kernels.rms_norm import rms_norm
from octavo.worker_proc.models.parameters import Parameters


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root-mean-square norm with a scale, over the last dimension."""

    weight_D: Tensor
    eps: float

    @classmethod
    def new(
        cls, parameters: Parameters, name: str, width: int, eps: float, *, dtype: torch.dtype | None = None
    ) -> "RMSNorm":
        """Make the layer that the checkpoint calls `name`; its scale has the model's type, or `dtype`."""
        return cls(parameters.new(f"{name}.weight", width, dtype=dtype), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized rows, in the shape of `x`."""
        return rms_norm(x, self.weight_D, self.eps)

    def fused_add_norm(self, x_TD: Tensor, update_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x + update`, and its normalized rows, in one pass."""
        return add_rms_norm(x_TD, update_TD, self.weight_D, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Layer norm with scale and bias."""

    weight_D: Tensor
    bias_D: Tensor
    eps: float

    @classmethod
    def new(
        cls,
        parameters: Parameters,
        name: str,
        width: int,
        eps: float,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
    ) -> "LayerNorm":
        """Make the layer that the checkpoint calls `name`. The scale or the bias may be missing."""
        zeros_D = torch.zeros(width, dtype=parameters.dtype, device=parameters.device)
        weight_D = parameters.new(f"{name}.weight", width) if has_weight else zeros_D + 1.0
        return cls(weight_D, parameters.new(f"{name}.bias", width) if has_bias else zeros_D, eps)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the normalized rows."""
        return layer_norm(x_TD, self.weight_D, self.bias_D, self.eps)

    def fused_add_norm(self, x_TD: Tensor, update_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x + update`, and its normalized rows."""
        total_TD = x_TD + update_TD
        return total_TD, self(total_TD)
