"""`multiply` on the CPU through torch."""

from torch import Tensor


def multiply(x_TD: Tensor, gate_TG: Tensor, *, has_silu: bool) -> Tensor:
    """See `octavo.kernels.multiply.multiply`."""
    gate32_TG = gate_TG.float().contiguous()
    if has_silu:  # not torch's silu: see `octavo.kernels.silu_and_mul.cpu`
        gate32_TG = gate32_TG / gate32_TG.neg().exp_().add_(1.0)
    return (x_TD.float() * gate32_TG).to(x_TD.dtype)
