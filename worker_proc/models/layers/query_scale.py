"""Query factors that grow with the position, so that long contexts do not flatten the softmax.

See arXiv 2501.19399.
"""

import torch
from torch import Tensor


class QueryScale:
    """`1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`, computed once for all positions.

    Args:
        floor_scale: number of consecutive positions that share a factor.
        attn_scale: growth of the factor.
    """

    def __init__(self, floor_scale: int, attn_scale: float) -> None:
        self._floor_scale, self._attn_scale = floor_scale, attn_scale
        self._table_L1 = torch.empty(0, 1)

    def prepare(self, num_positions: int, device: torch.device) -> None:
        """Compute the factors of positions below `num_positions`, unless they exist; on the CPU for every device."""
        if num_positions <= len(self._table_L1):
            return
        num_steps = (num_positions + self._floor_scale) // self._floor_scale
        steps_S = torch.log1p(torch.arange(num_steps, dtype=torch.float32)) * self._attn_scale + 1.0
        steps_L = torch.arange(1, num_positions + 1) // self._floor_scale
        self._table_L1 = steps_S[steps_L].unsqueeze(1).to(device)

    def lookup(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices and table of the factors, for `octavo.kernels.embedding.embeddings`."""
        return positions_T, self._table_L1
