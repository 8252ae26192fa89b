"""What `rope` means."""

import torch
from torch import Tensor


def rope(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """See `octavo.kernels.rope.rope`."""
    half = x_TNH.shape[2] // 2
    rotated = torch.complex(x_TNH[..., :half].float(), x_TNH[..., half:].float())
    rotated = rotated * torch.complex(cos_TC, sin_TC).unsqueeze(1)
    return torch.cat((rotated.real, rotated.imag), dim=2).to(x_TNH.dtype)
