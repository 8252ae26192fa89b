"""Rules and logits for the test and the benchmark of `route`."""

import torch
from torch import Tensor

from octavo.kernels.routing.rule import RoutingRule

CASES: dict[str, RoutingRule] = {
    "Mixtral": RoutingRule(8, 2),
    "Qwen3-MoE": RoutingRule(128, 8),
    "OLMoE": RoutingRule(64, 8, is_normalized=False),
    "GPT-OSS": RoutingRule(32, 4),
    "DeepSeek-V2": RoutingRule(160, 6, is_normalized=False, scale=16.0, num_groups=8, num_kept_groups=3),
    "DeepSeek-V3": RoutingRule(256, 8, "sigmoid", scale=2.5, num_groups=8, num_kept_groups=4, group_score="top2_sum"),
    "LFM2-MoE": RoutingRule(32, 4, "sigmoid", sum_offset=1e-6),
    "one expert": RoutingRule(1, 1),
    "all experts": RoutingRule(5, 5),
}
WITH_BIAS = frozenset({"DeepSeek-V3", "LFM2-MoE"})


def logits(num_tokens: int, rule: RoutingRule, seed: int = 0) -> Tensor:
    """Return logits with some ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_tokens, rule.num_experts, generator=generator) * 16).round() / 8


def bias(rule: RoutingRule, seed: int = 1) -> Tensor:
    """Return the bias of each expert, with many ties."""
    return (torch.randn(rule.num_experts, generator=torch.Generator().manual_seed(seed)) * 4).round() / 16
