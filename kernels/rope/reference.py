"""Reference of `rope`."""

import torch
from torch import Tensor


def rope(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """See `octavo.kernels.rope.rope`."""
    num_pairs = cos_TC.shape[1]
    rotated = torch.complex(x_TNH[..., :num_pairs].float(), x_TNH[..., num_pairs : 2 * num_pairs].float())
    rotated = rotated * torch.complex(cos_TC, sin_TC).unsqueeze(1)
    return torch.cat((rotated.real, rotated.imag, x_TNH[..., 2 * num_pairs :].float()), dim=2).to(x_TNH.dtype)
