"""The residual connection and the norm that follows it: on a GPU one pass over the rows instead of two."""

from torch import Tensor

from octavo.kernels.add_rms_norm import cpu
from octavo.kernels.add_rms_norm.record import record
from octavo.kernels.dispatch import choose, lazy, require

_IMPLEMENTATIONS = {
    "cpu": cpu.add_rms_norm,
    "recorded": record,
    "cuda": lazy("octavo.kernels.add_rms_norm.gpu", cpu.add_rms_norm),
}


def add_rms_norm(x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + update`, and the `octavo.kernels.rms_norm` of that sum, which was rounded to its dtype.

    The bits are those of the two operations one after the other.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TD.shape == update_TD.shape and len(x_TD.shape) == 2 and weight_D.shape == x_TD.shape[1:],
        f"add_rms_norm: {tuple(x_TD.shape)} and {tuple(update_TD.shape)} with a weight {tuple(weight_D.shape)}",
    )
    return choose("add_rms_norm", _IMPLEMENTATIONS, x_TD.device)(x_TD, update_TD, weight_D, eps)
