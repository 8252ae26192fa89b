"""Matrix product with a weight, the same bits for a row in any batch. Does not quantize or shard."""

from torch import Tensor

from octavo.kernels.dispatch import choose, require
from octavo.kernels.linear import cpu

_IMPLEMENTATIONS = {"cpu": cpu.linear}


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, shape TO, in the dtype of `x`.

    Sums are accumulated in float32 at least.

    Raises:
        ShapeError: the shapes or dtypes do not go together.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TI.ndim == 2
        and weight_OI.ndim == 2
        and x_TI.shape[1] == weight_OI.shape[1]
        and x_TI.dtype == weight_OI.dtype,
        f"linear: {tuple(x_TI.shape)} {x_TI.dtype} with a weight {tuple(weight_OI.shape)} {weight_OI.dtype}",
    )
    require(bias_O is None or bias_O.shape == weight_OI.shape[:1], "linear: the bias needs one value per output")
    return choose("linear", _IMPLEMENTATIONS, x_TI.device)(x_TI, weight_OI, bias_O)
