"""`latent_heads` through torch."""

import torch
from torch import Tensor

from octavo.kernels.latent_heads.widths import LatentWidths


def latent_heads(
    q_TNP: Tensor,
    q_latent_TM: Tensor,
    latent_TL: Tensor,
    k_rotary_TR: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    widths: LatentWidths,
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.latent_heads.latent_heads`."""
    q_rotary = _rotated(q_TNP[:, :, widths.plain :], cos_TC, sin_TC, widths)
    k_rotary = _rotated(k_rotary_TR.unsqueeze(1), cos_TC, sin_TC, widths)
    q_latent = q_latent_TM.unflatten(1, (-1, widths.latent))
    return torch.cat((q_latent, q_rotary), 2), torch.cat((latent_TL.unsqueeze(1), k_rotary), 2)


def _rotated(x_TNR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: LatentWidths) -> Tensor:
    x = x_TNR.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if widths.is_interleaved else x.chunk(2, dim=2)
    cos, sin = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 2).to(x_TNR.dtype)
