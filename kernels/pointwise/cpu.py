"""`pointwise` on the CPU through torch: operations with one routine for all elements of a contiguous tensor."""

import torch
from torch import Tensor

from octavo.kernels.pointwise.functions import Function


def pointwise(function: Function, x: Tensor, parameter: float) -> Tensor:
    """See `octavo.kernels.pointwise`."""
    x32 = x.float().contiguous()
    match function:
        case Function.SCALE:
            y32 = x32 * parameter
        case Function.SOFT_CAP:
            y32 = torch.tanh(x32 / parameter).mul_(parameter)
        case Function.CLAMP:
            y32 = x32.clamp(-parameter, parameter)
        case Function.RELU_SQUARED:
            y32 = x32.relu().square_()
    return y32.to(x.dtype)
