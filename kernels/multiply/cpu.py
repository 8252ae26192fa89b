"""`multiply` on the CPU through torch."""

from torch import Tensor


def multiply(x_TD: Tensor, gate_TD: Tensor, *, has_silu: bool) -> Tensor:
    """See `octavo.kernels.multiply.multiply`."""
    gate32_TD = gate_TD.float().contiguous()
    if has_silu:  # not torch's silu: see `octavo.kernels.silu_and_mul.cpu`
        gate32_TD = gate32_TD / gate32_TD.neg().exp_().add_(1.0)
    return (x_TD.float() * gate32_TD).to(x_TD.dtype)
