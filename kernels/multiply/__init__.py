"""The product of two rows, number by number, or of a row and one number."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.multiply import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.multiply,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.multiply.gpu", cpu.multiply),
}


def multiply(x_TD: Tensor, gate_TG: Tensor, *, has_silu: bool = False) -> Tensor:
    """Return `x * gate`, or `x * silu(gate)` if `has_silu`, in the dtype of `x`; computed in float32.

    Args:
        x_TD: rows.
        gate_TG: one gate for each number, or for each row.
        has_silu: whether silu is applied to the gates.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TD.ndim == gate_TG.ndim == 2 and gate_TG.shape[0] == x_TD.shape[0] and gate_TG.shape[1] in (1, x_TD.shape[1]),
        f"multiply: rows {tuple(x_TD.shape)} and {tuple(gate_TG.shape)}",
    )
    return choose("multiply", _IMPLEMENTATIONS, x_TD.device)(x_TD, gate_TG, has_silu=has_silu)
