"""Reference of `route`: one token after another, in float64."""

import torch
from torch import Tensor

from octavo.kernels.routing.rule import RoutingRule


def route(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.routing.route`."""
    rows = [_route_one(logits_E.double(), rule, bias_E) for logits_E in logits_TE]
    return torch.stack([experts for experts, _ in rows]), torch.stack([weights for _, weights in rows])


def _route_one(logits_E: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    scores: list[float] = (logits_E.softmax(0) if rule.score == "softmax" else logits_E.sigmoid()).tolist()
    biases: list[float] = [0.0] * rule.num_experts if bias_E is None else bias_E.tolist()
    choice = [score + bias for score, bias in zip(scores, biases, strict=True)]
    size = rule.num_experts // rule.num_groups
    groups = [sorted(choice[first : first + size], reverse=True) for first in range(0, rule.num_experts, size)]
    group_scores = [group[0] if rule.group_score == "max" else group[0] + group[1] for group in groups]
    kept = sorted(range(rule.num_groups), key=lambda group: -group_scores[group])[: rule.num_kept_groups]
    allowed = [expert for expert in range(rule.num_experts) if expert // size in kept]
    chosen = sorted(sorted(allowed, key=lambda expert: -choice[expert])[: rule.top_k])
    weights = [scores[expert] for expert in chosen]
    total = max(sum(weights) + rule.sum_offset, 1e-20) if rule.is_normalized else 1.0
    return torch.tensor(chosen, dtype=torch.int32), torch.tensor([rule.scale * weight / total for weight in weights])
