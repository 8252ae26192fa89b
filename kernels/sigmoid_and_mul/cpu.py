"""`sigmoid_and_mul` on the CPU through torch; see `octavo.kernels.silu_and_mul.cpu` on the choice of functions."""

from torch import Tensor


def sigmoid_and_mul(gate_TG: Tensor, x_TD: Tensor) -> Tensor:
    """See `octavo.kernels.sigmoid_and_mul.sigmoid_and_mul`."""
    inverse_TG = gate_TG.float().contiguous().neg().exp_().add_(1.0)
    return (x_TD.float() / inverse_TG).to(x_TD.dtype)
