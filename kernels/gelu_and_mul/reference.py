"""Reference of `gelu_and_mul`."""

from torch import Tensor

from octavo.kernels.gelu.reference import gelu


def gelu_and_mul(gate_up_T2F: Tensor, uses_tanh: bool) -> Tensor:
    """See `octavo.kernels.gelu_and_mul.gelu_and_mul`."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    return gelu(gate_TF, uses_tanh) * up_TF
