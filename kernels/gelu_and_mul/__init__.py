"""The gated activation with gelu, in its exact and its tanh form: Gemma's mlp."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.gelu_and_mul import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.gelu_and_mul,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.gelu_and_mul.gpu", cpu.gelu_and_mul),
}


def gelu_and_mul(gate_up_T2F: Tensor, *, uses_tanh: bool) -> Tensor:
    """Return `gelu(gate) * up`, shape TF, where `gate` is the first half of each row and `up` the second.

    `gelu(gate)` is computed in float32 and rounded to the dtype of the argument before the product.

    Args:
        gate_up_T2F: both halves.
        uses_tanh: see `octavo.kernels.gelu`.

    Raises:
        ShapeError: the rows have an odd length.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        gate_up_T2F.ndim == 2 and gate_up_T2F.shape[1] % 2 == 0,
        f"gelu_and_mul: rows {tuple(gate_up_T2F.shape)} have no two halves",
    )
    return choose("gelu_and_mul", _IMPLEMENTATIONS, gate_up_T2F.device)(gate_up_T2F, uses_tanh)
