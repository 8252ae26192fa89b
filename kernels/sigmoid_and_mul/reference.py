"""Reference of `sigmoid_and_mul`."""

from torch import Tensor


def sigmoid_and_mul(gate_TG: Tensor, x_TD: Tensor) -> Tensor:
    """See `octavo.kernels.sigmoid_and_mul.sigmoid_and_mul`."""
    return (gate_TG.double().sigmoid() * x_TD.double()).to(x_TD.dtype)
