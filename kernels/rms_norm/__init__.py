"""Root-mean-square normalization of rows. Does not add residuals."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.rms_norm import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.rms_norm,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.rms_norm.gpu", cpu.rms_norm),
}


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale each row of `x`, its last dimension, to unit root mean square, then by `weight`.

    Computed in float32. Through torch and on a GPU it is rounded to the dtype of `weight` before the product with it:
    to that of `x` as in Llama, or, with float32 weights, not at all, as in Gemma. A program rounds once, if at all.

    Args:
        x: rows of two or more dimensions.
        weight_D: in the dtype of `x` or in float32.
        eps: added to the mean square.

    Raises:
        ShapeError: `weight` does not have the last dimension of `x`.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x.ndim >= 2 and weight_D.shape == x.shape[-1:],
        f"rms_norm: rows {tuple(x.shape)} with a weight {tuple(weight_D.shape)}",
    )
    return choose("rms_norm", _IMPLEMENTATIONS, x.device)(x, weight_D, eps)
