"""The product of two rows, number by number."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.multiply import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.multiply,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.multiply.gpu", cpu.multiply),
}


def multiply(x_TD: Tensor, gate_TD: Tensor, *, has_silu: bool = False) -> Tensor:
    """Return `x * gate`, or `x * silu(gate)` if `has_silu`, in the dtype of `x`; computed in float32.

    Raises:
        ShapeError: the shapes differ.
        UnsupportedDevice: no implementation for the device.
    """
    require(x_TD.shape == gate_TD.shape, f"multiply: rows {tuple(x_TD.shape)} and {tuple(gate_TD.shape)}")
    return choose("multiply", _IMPLEMENTATIONS, x_TD.device)(x_TD, gate_TD, has_silu=has_silu)
