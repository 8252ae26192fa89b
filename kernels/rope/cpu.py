"""`rope` on the CPU through torch: single products and sums, which round the same way wherever they run."""

import torch
from torch import Tensor


def rope(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """See `octavo.kernels.rope.rope`."""
    cos_T1C, sin_T1C = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
    first_TNC, second_TNC = x_TNH.float().chunk(2, dim=2)
    rotated_TNH = torch.cat(
        (first_TNC * cos_T1C - second_TNC * sin_T1C, second_TNC * cos_T1C + first_TNC * sin_T1C), dim=2
    )
    return rotated_TNH.to(x_TNH.dtype)
