"""How a model chooses the experts of a token."""

from dataclasses import dataclass
from typing import Literal

from octavo.kernels.dispatch import require

MAX_EXPERTS = 1024
"""Of one layer."""
NO_EXPERT = -1
"""In place of the experts of a token that has no scores but NaN, on a GPU: its weights are NaN, and no expert's weights
are read for it."""


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The choice of `top_k` experts by their scores, and the weights of the chosen ones.

    Raises:
        ShapeError: the numbers do not fit each other.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of the logits, in float32."""
    is_normalized: bool = True
    """The weights of a token are divided by their sum. After a softmax that is the softmax of the chosen logits."""
    sum_offset: float = 0.0
    """Added to that sum, which is less than one if scores are sigmoids (LFM2-MoE)."""
    scale: float = 1.0
    """Of the weights."""
    num_groups: int = 1
    """Of experts, of equal size (DeepSeek)."""
    num_kept_groups: int = 1
    """Only experts of the groups with the highest scores can be chosen."""
    group_score: Literal["max", "top2_sum"] = "max"
    """Of the scores of the group's experts."""

    def __post_init__(self) -> None:
        require(
            0 < self.top_k <= self.num_experts <= MAX_EXPERTS,
            f"route: {self.top_k} of {self.num_experts} experts; there may be at most {MAX_EXPERTS}",
        )
        require(
            0 < self.num_kept_groups <= self.num_groups and self.num_experts % self.num_groups == 0,
            f"route: {self.num_kept_groups} of {self.num_groups} groups of {self.num_experts} experts",
        )
        group_size = self.num_experts // self.num_groups
        require(
            self.top_k <= self.num_kept_groups * group_size and (self.group_score == "max" or group_size > 1),
            f"route: {self.top_k} experts out of {self.num_kept_groups} groups of {group_size}",
        )
