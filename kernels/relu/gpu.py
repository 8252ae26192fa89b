"""`relu` on a GPU through torch, at the rate of the memory."""

from torch import Tensor


def relu(x_TF: Tensor) -> Tensor:
    """See `octavo.kernels.relu.relu`."""
    return x_TF.relu()
