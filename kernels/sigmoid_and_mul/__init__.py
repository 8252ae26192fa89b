"""Gates rows: `sigmoid(gate) * x`, for shared experts and gated attention."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.sigmoid_and_mul import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.sigmoid_and_mul,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.sigmoid_and_mul.gpu", cpu.sigmoid_and_mul),
}


def sigmoid_and_mul(gate_TG: Tensor, x_TD: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x`, shape TD, in the dtype of `x`; computed in float32.

    Args:
        gate_TG: one gate for each row, or for each number.
        x_TD: rows.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TD.ndim == gate_TG.ndim == 2 and gate_TG.shape[0] == x_TD.shape[0] and gate_TG.shape[1] in (1, x_TD.shape[1]),
        f"sigmoid_and_mul: gates {tuple(gate_TG.shape)} for rows {tuple(x_TD.shape)}",
    )
    return choose("sigmoid_and_mul", _IMPLEMENTATIONS, x_TD.device)(gate_TG, x_TD)
