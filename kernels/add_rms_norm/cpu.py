"""`add_rms_norm` on the CPU through torch: one after another."""

from torch import Tensor

from octavo.kernels.add.cpu import add
from octavo.kernels.rms_norm.cpu import rms_norm


def add_rms_norm(x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.add_rms_norm.add_rms_norm`."""
    sum_TD = add(x_TD, update_TD)
    return sum_TD, rms_norm(sum_TD, weight_D, eps)
