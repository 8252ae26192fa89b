"""`rope` on the CPU through torch: single products and sums, which round the same way at any position."""

import torch
from torch import Tensor


def rope(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """See `octavo.kernels.rope.rope`."""
    num_pairs = cos_TC.shape[1]
    cos_T1C, sin_T1C = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
    first_TNC, second_TNC, rest = x_TNH.float().split([num_pairs, num_pairs, x_TNH.shape[2] - 2 * num_pairs], dim=2)
    rotated_TNH = torch.cat(
        (first_TNC * cos_T1C - second_TNC * sin_T1C, second_TNC * cos_T1C + first_TNC * sin_T1C, rest), dim=2
    )
    return rotated_TNH.to(x_TNH.dtype)
