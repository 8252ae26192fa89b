"""Reference of `linear`."""

import torch
from torch import Tensor


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Multiply in float32 by the unpacked weight."""
    out_TO = torch.einsum("ti,oi->to", x_TI.float(), weight_OI.float())
    if bias_O is not None:
        out_TO = out_TO + bias_O.float()
    return out_TO.to(x_TI.dtype)
