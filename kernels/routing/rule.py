"""How a model chooses the experts of a token."""

from dataclasses import dataclass
from typing import Literal

from octavo.kernels.dispatch import require

MAX_EXPERTS = 1024
"""Maximum experts of one layer."""
NO_EXPERT = -1
"""Expert of a token whose scores are all NaN, on a GPU: its weights are NaN, and no expert's weights are read for
it."""


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How `top_k` experts are chosen by their scores, and how their weights are computed.

    Raises:
        ShapeError: the numbers are inconsistent.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Scoring function of the logits, in float32."""
    is_normalized: bool = True
    """Whether the weights of a token are divided by their sum. After a softmax, that is the softmax of the chosen
    logits."""
    sum_offset: float = 0.0
    """Added to that sum, which is less than one if scores are sigmoids (LFM2-MoE)."""
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Groups of experts, of equal size (DeepSeek)."""
    num_kept_groups: int = 1
    """Number of groups with the highest scores; only their experts can be chosen."""
    group_score: Literal["max", "top2_sum"] = "max"
    """How the score of a group is computed from those of its experts."""

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
