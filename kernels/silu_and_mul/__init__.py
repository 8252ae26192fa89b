"""The gated activation of the Llama family's mlp."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.silu_and_mul import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.silu_and_mul,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.silu_and_mul.gpu", cpu.silu_and_mul),
}


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return `silu(gate) * up`, shape TF, where `gate` is the first half of each row and `up` the second.

    `silu(gate)` is computed in float32 and rounded to the dtype of the argument before the product.

    Raises:
        ShapeError: the rows have an odd length.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        gate_up_T2F.ndim == 2 and gate_up_T2F.shape[1] % 2 == 0,
        f"silu_and_mul: rows {tuple(gate_up_T2F.shape)} have no two halves",
    )
    return choose("silu_and_mul", _IMPLEMENTATIONS, gate_up_T2F.device)(gate_up_T2F)
