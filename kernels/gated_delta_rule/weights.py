"""The weights of `gated_delta_rule`. Computes nothing."""

from dataclasses import dataclass

from torch import Tensor

NORM_EPS = 1e-6
"""Added to the sums of squares of queries and keys."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """One number for each value head."""

    a_log_H: Tensor
    dt_bias_H: Tensor

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.a_log_H)
