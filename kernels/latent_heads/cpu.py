"""`latent_heads` through torch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.kernels.latent_heads.widths import HeadWidths


def latent_heads(
    q_TP: Tensor, kv_TP: Tensor, k_rotary_TR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: HeadWidths
) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.latent_heads.latent_heads`."""
    q_plain, q_rotary = q_TP.unflatten(1, (-1, widths.head)).split([widths.plain, widths.rotary], dim=2)
    k_plain, v = kv_TP.unflatten(1, (-1, widths.plain + widths.value)).split([widths.plain, widths.value], dim=2)
    k_rotary = _rotated(k_rotary_TR.unsqueeze(1), cos_TC, sin_TC, widths).expand(-1, k_plain.shape[1], -1)
    return (
        torch.cat((_rotated(q_rotary, cos_TC, sin_TC, widths), q_plain), 2),
        torch.cat((k_rotary, k_plain), 2),
        pad(v, (0, widths.head - widths.value)),
    )


def latent_values(out_TNH: Tensor, widths: HeadWidths) -> Tensor:
    """See `octavo.kernels.latent_heads.latent_values`."""
    return out_TNH[:, :, : widths.value].flatten(1)


def _rotated(x_TNR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: HeadWidths) -> Tensor:
    x = x_TNR.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if widths.is_interleaved else x.chunk(2, dim=2)
    cos, sin = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 2).to(x_TNR.dtype)
