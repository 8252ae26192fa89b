"""Reference of `multiply`."""

from torch import Tensor
from torch.nn.functional import silu


def multiply(x_TD: Tensor, gate_TG: Tensor, *, has_silu: bool) -> Tensor:
    """See `octavo.kernels.multiply.multiply`."""
    gate = gate_TG.double()
    return (x_TD.double() * (silu(gate) if has_silu else gate)).to(x_TD.dtype)
