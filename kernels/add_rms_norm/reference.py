"""Reference of `add_rms_norm`."""

from torch import Tensor

from octavo.kernels.add.reference import add
from octavo.kernels.rms_norm.reference import rms_norm


def add_rms_norm(x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.add_rms_norm.add_rms_norm`."""
    sum_TD = add(x_TD, update_TD)
    return sum_TD, rms_norm(sum_TD, weight_D, eps)
