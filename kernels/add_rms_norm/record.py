"""Records `add_rms_norm` in a program: two operations, of which a product before them absorbs the first."""

from torch import Tensor

from octavo.kernels.add import native as add
from octavo.kernels.rms_norm import native as rms_norm


def record(x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Record the sum and its norm."""
    sum_TD = add.record(x_TD, update_TD)
    return sum_TD, rms_norm.record(sum_TD, weight_D, eps)
