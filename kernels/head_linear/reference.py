"""Reference of `head_linear`."""

import torch
from torch import Tensor


def head_linear(x_TNS: Tensor, weight_NOI: Tensor) -> Tensor:
    """Multiply the first I columns of each head by the head's weight, in float32."""
    x_TNI = x_TNS[:, :, : weight_NOI.shape[2]]
    return torch.einsum("tni,noi->tno", x_TNI.float(), weight_NOI.float()).flatten(1).to(x_TNS.dtype)
