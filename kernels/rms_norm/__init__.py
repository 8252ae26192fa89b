"""Root-mean-square normalization of rows. Does not add residuals."""

from torch import Tensor

from octavo.kernels.dispatch import choose, require
from octavo.kernels.rms_norm import cpu

_IMPLEMENTATIONS = {"cpu": cpu.rms_norm}


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` to unit root mean square, then by `weight`.

    Computed in float32, rounded to the dtype of `x` before the product with `weight`: the order of the
    Hugging Face models, whose weights were trained with it.

    Raises:
        ShapeError: `weight` does not have the last dimension of `x`.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TD.ndim == 2 and weight_D.shape == x_TD.shape[1:],
        f"rms_norm: rows {tuple(x_TD.shape)} with a weight {tuple(weight_D.shape)}",
    )
    return choose("rms_norm", _IMPLEMENTATIONS, x_TD.device)(x_TD, weight_D, eps)
