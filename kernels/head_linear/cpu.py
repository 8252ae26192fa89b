"""`head_linear` through torch, one head after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.linear import PackedLinear, linear


def head_linear(x_TNS: Tensor, heads: Sequence[PackedLinear]) -> Tensor:
    """See `octavo.kernels.head_linear.head_linear`."""
    pairs = zip(x_TNS.unbind(1), heads, strict=True)
    return torch.cat([linear(x_TS[:, : head.num_inputs].contiguous(), head) for x_TS, head in pairs], 1)
