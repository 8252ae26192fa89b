"""Layer normalization of rows. Does not add residuals."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.layer_norm import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.layer_norm,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.layer_norm.gpu", cpu.layer_norm),
}


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Give each row of `x` mean 0 and variance 1, then scale by `weight` and add `bias`.

    Computed in float32 and rounded once, to the dtype of `x`. On a CPU rows may be divided into heads (TNH, weights and
    biases NH), of which each is normalized alone.

    Raises:
        ShapeError: `weight` or `bias` does not have the last dimension of `x`.
        UnsupportedDevice: no implementation for the device, or none for heads.
    """
    require(
        x_TD.ndim in (2, 3) and weight_D.shape == bias_D.shape == x_TD.shape[1:],
        f"layer_norm: rows {tuple(x_TD.shape)} with {tuple(weight_D.shape)} and {tuple(bias_D.shape)}",
    )
    return choose("layer_norm", _IMPLEMENTATIONS, x_TD.device)(x_TD, weight_D, bias_D, eps)
