"""What `latent_heads` means: head by head, pair by pair."""

import torch
from torch import Tensor

from octavo.kernels.latent_heads.widths import HeadWidths


def latent_heads(
    q_TP: Tensor, kv_TP: Tensor, k_rotary_TR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: HeadWidths
) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.latent_heads.latent_heads`; in float32."""
    num_tokens, num_heads = len(q_TP), q_TP.shape[1] // widths.head
    q, k, v = (torch.zeros(num_tokens, num_heads, widths.head) for _ in range(3))
    for head in range(num_heads):
        first = head * widths.head
        q[:, head, widths.rotary :] = q_TP[:, first : first + widths.plain]
        q[:, head, : widths.rotary] = _rotated(
            q_TP[:, first + widths.plain : first + widths.head], cos_TC, sin_TC, widths
        )
        first = head * (widths.plain + widths.value)
        k[:, head, widths.rotary :] = kv_TP[:, first : first + widths.plain]
        k[:, head, : widths.rotary] = _rotated(k_rotary_TR, cos_TC, sin_TC, widths)
        v[:, head, : widths.value] = kv_TP[:, first + widths.plain : first + widths.plain + widths.value]
    return q, k, v


def _rotated(x_TR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: HeadWidths) -> Tensor:
    x_TR, half = x_TR.float(), widths.rotary // 2
    rotated_TR = torch.empty_like(x_TR)
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if widths.is_interleaved else (pair, pair + half)
        cos, sin = cos_TC[:, pair], sin_TC[:, pair]
        rotated_TR[:, pair] = x_TR[:, a] * cos - x_TR[:, b] * sin
        rotated_TR[:, pair + half] = x_TR[:, b] * cos + x_TR[:, a] * sin
    return rotated_TR
