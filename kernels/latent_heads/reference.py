"""Reference of `latent_heads`: head by head, pair by pair."""

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
    """See `octavo.kernels.latent_heads.latent_heads`; in float32."""
    num_tokens, num_heads = q_TNP.shape[:2]
    q, k = torch.zeros(num_tokens, num_heads, widths.key), torch.zeros(num_tokens, 1, widths.key)
    for head in range(num_heads):
        first = head * widths.latent
        q[:, head, : widths.latent] = q_latent_TM[:, first : first + widths.latent]
        q[:, head, widths.latent :] = _rotated(q_TNP[:, head, widths.plain :], cos_TC, sin_TC, widths)
    k[:, 0, : widths.latent] = latent_TL
    k[:, 0, widths.latent :] = _rotated(k_rotary_TR, cos_TC, sin_TC, widths)
    return q, k


def _rotated(x_TR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: LatentWidths) -> Tensor:
    x_TR, half = x_TR.float(), widths.rotary // 2
    rotated_TR = torch.empty_like(x_TR)
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if widths.is_interleaved else (pair, pair + half)
        cos, sin = cos_TC[:, pair], sin_TC[:, pair]
        rotated_TR[:, pair] = x_TR[:, a] * cos - x_TR[:, b] * sin
        rotated_TR[:, pair + half] = x_TR[:, b] * cos + x_TR[:, a] * sin
    return rotated_TR
