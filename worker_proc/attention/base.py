"""What a model sees of attention: one call per layer."""

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Attention over the past of every request of the step, planned or recorded."""

    def run(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer_index: int) -> Tensor:
        """Store the step's keys and values of a layer, then attend; returns out_TNH."""
