"""`route` through torch."""

import torch
from torch import Tensor

from octavo.kernels.routing.rule import RoutingRule


def route(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the experts and their weights, shape TK: see `octavo.kernels.routing.route`."""
    logits_TE = logits_TE.float()
    # Not `sigmoid`: its bits depend on the position of an element; see `octavo.kernels.silu_and_mul.cpu`.
    score_TE = logits_TE.softmax(1) if rule.score == "softmax" else 1.0 / (1.0 + logits_TE.contiguous().neg().exp())
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    if rule.num_kept_groups < rule.num_groups:
        choice_TGE = choice_TE.unflatten(1, (rule.num_groups, -1))
        count = 1 if rule.group_score == "max" else 2
        is_kept_TG = torch.zeros(choice_TGE.shape[:2], dtype=torch.bool, device=logits_TE.device)
        is_kept_TG.scatter_(1, _largest(choice_TGE.topk(count, dim=2).values.sum(2), rule.num_kept_groups), True)
        choice_TE = choice_TGE.masked_fill(~is_kept_TG.unsqueeze(2), -torch.inf).flatten(1)
    expert_TK = _largest(choice_TE, rule.top_k).sort(dim=1).values
    weight_TK = score_TE.gather(1, expert_TK)
    if rule.is_normalized:
        # One after another: torch's sum may depend on the number of rows.
        sum_T1 = sum(weight_TK.split(1, dim=1)) + rule.sum_offset
        weight_TK = weight_TK / sum_T1.clamp(min=1e-20)
    return expert_TK.to(torch.int32), weight_TK * rule.scale


def _largest(values_TN: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of each row. Not `topk`, which leaves the order of ties undefined."""
    return values_TN.argsort(dim=1, descending=True, stable=True)[:, :count]
