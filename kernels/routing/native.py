"""`route` in C++: its arguments, mirrored from `native.h`."""

import ctypes

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, Value, as_tensor, value_of
from octavo.kernels.routing.rule import RoutingRule


class RouteArguments(Arguments):
    """See `RouteArgs`."""

    _fields_ = (
        ("logits", Matrix),
        ("bias", Matrix),
        ("experts", Matrix),
        ("weights", Matrix),
        ("num_groups", ctypes.c_int64),
        ("num_kept_groups", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("sum_offset", ctypes.c_float),
        ("is_sigmoid", ctypes.c_int32),
        ("is_normalized", ctypes.c_int32),
        ("sums_two", ctypes.c_int32),
    )


def arguments(
    logits: Matrix, rule: RoutingRule, bias_E: Tensor | None, experts: Matrix, weights: Matrix
) -> RouteArguments:
    """Return the arguments of the operation; the bias must outlive them."""
    return RouteArguments(
        logits,
        Matrix() if bias_E is None else Matrix.of(bias_E[None]),
        experts,
        weights,
        rule.num_groups,
        rule.num_kept_groups,
        rule.scale,
        rule.sum_offset,
        rule.score == "sigmoid",
        rule.is_normalized,
        rule.group_score == "top2_sum",
    )


def record(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Record the routing."""
    value = value_of(logits_TE)
    experts, weights = Buffer(rule.top_k, torch.int32), Buffer(rule.top_k)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return arguments(inputs[0], rule, bias_E, *outputs)

    node = Node("route", [value], [experts, weights], bind, is_row_wise=True, keep_alive=[bias_E])
    expert_TK = value.recorder.append(node, (rule.top_k,))
    return as_tensor(expert_TK), as_tensor(Value(value.recorder, weights, 0, (rule.top_k,)))
