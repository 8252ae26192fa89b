"""Reference of `varlen_attention`, and its implementation on the CPU: one part after the other."""

import torch
from torch import Tensor

from octavo.kernels.varlen_attention.parts import Parts


def varlen_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, parts: Parts, scale: float) -> Tensor:
    """See `octavo.kernels.varlen_attention.varlen_attention`."""
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
    for start, end, key_end in zip(parts.starts, parts.starts[1:], parts.key_ends, strict=False):
        q, k, v = (
            x[start:last].float().transpose(0, 1) for x, last in ((q_TNH, end), (k_TNH, key_end), (v_TNH, key_end))
        )
        weights = (q @ k.transpose(1, 2) * scale).softmax(dim=-1)
        out_TNH[start:end] = (weights @ v).transpose(0, 1).to(out_TNH.dtype)
    return out_TNH
