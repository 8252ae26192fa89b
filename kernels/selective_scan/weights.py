"""The weights of `selective_scan`. Computes nothing."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ScanWeights:
    """One number for each head, and the limits of dt."""

    a_log_H: Tensor
    dt_bias_H: Tensor
    skip_H: Tensor
    """D of the paper."""
    dt_min: float = 0.0
    dt_max: float = math.inf

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.a_log_H)
