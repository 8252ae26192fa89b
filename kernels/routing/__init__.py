"""Chooses the experts of every token of a mixture of experts, and their weights. Computes neither logits nor
experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.routing import cpu, native
from octavo.kernels.routing.rule import NO_EXPERT as NO_EXPERT
from octavo.kernels.routing.rule import RoutingRule as RoutingRule

_IMPLEMENTATIONS = {
    "cpu": cpu.route,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.routing.gpu", cpu.route),
}


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts of every token."""

    expert_TK: Tensor
    """int32, ascending; see `NO_EXPERT`."""
    weight_TK: Tensor
    """float32: factors of the experts' outputs."""


def route(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None = None) -> Routing:
    """Return the experts of every token; in ties the expert with the lower index is chosen.

    Args:
        logits_TE: any float; scores are computed in float32.
        rule: routing rule of the model.
        bias_E: float32, added to the scores when groups and experts are chosen, not in the weights (DeepSeek-V3).

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        logits_TE.ndim == 2 and logits_TE.shape[1] == rule.num_experts,
        f"route: logits of shape {tuple(logits_TE.shape)} for {rule.num_experts} experts",
    )
    require(
        bias_E is None or (bias_E.shape == (rule.num_experts,) and bias_E.dtype == torch.float32),
        "route: the bias needs one float32 per expert",
    )
    return Routing(*choose("route", _IMPLEMENTATIONS, logits_TE.device)(logits_TE, rule, bias_E))
