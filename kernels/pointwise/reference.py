"""References of the functions of `pointwise`."""

import torch
from torch import Tensor

from octavo.kernels.pointwise.functions import Function


def pointwise(function: Function, x: Tensor, parameter: float) -> Tensor:
    """See `octavo.kernels.pointwise`."""
    x64 = x.double()
    match function:
        case Function.SCALE:
            y64 = x64 * parameter
        case Function.SOFT_CAP:
            y64 = parameter * torch.tanh(x64 / parameter)
        case Function.CLAMP:
            y64 = x64.clamp(-parameter, parameter)
        case Function.RELU_SQUARED:
            y64 = x64.clamp(min=0.0).square()
    return y64.to(x.dtype)
