"""Rotary position embedding of queries and keys. The caller computes the angles."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.rope import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.rope,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.rope.gpu", cpu.rope),
}


def rope(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotate the pairs (x[c], x[c + C]) of every head by the angle of the token's position.

    Computed in float32 and rounded once, to the dtype of `x`. If 2C < H, the rest of a head is unchanged.

    Args:
        x_TNH: queries or keys.
        cos_TC, sin_TC: float32, of the angle of each token and pair.

    Raises:
        ShapeError: the angles do not fit `x`.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TNH.ndim == 3
        and cos_TC.shape == sin_TC.shape
        and cos_TC.shape[0] == x_TNH.shape[0]
        and 2 * cos_TC.shape[1] <= x_TNH.shape[2],
        f"rope: heads {tuple(x_TNH.shape)} with angles {tuple(cos_TC.shape)} and {tuple(sin_TC.shape)}",
    )
    return choose("rope", _IMPLEMENTATIONS, x_TNH.device)(x_TNH, cos_TC, sin_TC)
