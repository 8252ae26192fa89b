"""`route` on a GPU: one program chooses the experts of one token, in an order that depends only on the rule."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.routing.rule import NO_EXPERT, RoutingRule

_NO_EXPERT = tl.constexpr(NO_EXPERT)


def route(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.routing.route`. All experts of a token without valid scores, such as padding, are
    `NO_EXPERT`."""
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    num_tokens = logits_TE.shape[0]
    expert_TK = torch.empty(num_tokens, rule.top_k, dtype=torch.int32, device=logits_TE.device)
    weight_TK = torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=logits_TE.device)
    if not num_tokens:
        return expert_TK, weight_TK
    block = triton.next_power_of_2(rule.num_experts)
    _route_kernel[(num_tokens,)](
        logits_TE,
        bias_E,
        expert_TK,
        weight_TK,
        rule.scale,
        logits_TE.stride(0),
        NUM_EXPERTS=rule.num_experts,
        TOP_K=rule.top_k,
        NUM_GROUPS=rule.num_groups,
        NUM_KEPT_GROUPS=rule.num_kept_groups,
        IS_SIGMOID=rule.score == "sigmoid",
        IS_NORMALIZED=rule.is_normalized,
        SUM_OFFSET=rule.sum_offset,
        SUMS_TWO=rule.group_score == "top2_sum",
        BLOCK=block,
        num_warps=max(block // 256, 1),
    )
    return expert_TK, weight_TK


@triton.jit
def _first_largest(values, is_open):
    """Return the index of the largest value where `is_open`; the first one in ties."""
    indices = tl.arange(0, values.shape[0])
    largest = tl.max(tl.where(is_open, values, float("-inf")), axis=0)
    return tl.min(tl.where(is_open & (values == largest), indices, values.shape[0]), axis=0)


@triton.jit
def _in_kept_groups(
    choice,
    is_open,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
):
    """Return which experts belong to the groups with the highest scores. The score of a group is its best expert's, or
    the sum of its two best if SUMS_TWO."""
    experts = tl.arange(0, choice.shape[0])
    groups = experts // (NUM_EXPERTS // NUM_GROUPS)
    scores = choice
    for group in tl.static_range(NUM_GROUPS):
        is_member = is_open & (groups == group)
        score = tl.max(tl.where(is_member, choice, float("-inf")), axis=0)
        if SUMS_TWO:
            others = is_member & (experts != _first_largest(choice, is_member))
            score += tl.max(tl.where(others, choice, float("-inf")), axis=0)
        scores = tl.where(groups == group, score, scores)
    is_kept = experts < 0
    for _ in tl.static_range(NUM_KEPT_GROUPS):
        best = _first_largest(scores, is_open & ~is_kept)
        is_kept |= groups == best // (NUM_EXPERTS // NUM_GROUPS)
    return is_kept & is_open


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    scale,
    token_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    SUM_OFFSET: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program t chooses the experts of token t, and stores them in ascending order with their weights.

    `choice`: scores by which experts are chosen, including the bias; weights come from the scores without it.
    """
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    is_expert = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * token_stride + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))  # NaN equals nothing, so it could not be chosen
    is_open = is_expert
    if NUM_KEPT_GROUPS < NUM_GROUPS:
        is_open = _in_kept_groups(choice, is_open, NUM_EXPERTS, NUM_GROUPS, NUM_KEPT_GROUPS, SUMS_TWO)
    is_chosen = experts < 0
    for _ in range(TOP_K):
        is_chosen |= experts == _first_largest(choice, is_open & ~is_chosen)
    weights = scores
    if IS_NORMALIZED:
        total = tl.sum(tl.where(is_chosen, scores, 0.0), axis=0)
        if SUM_OFFSET > 0.0:
            total += SUM_OFFSET
        weights = scores / tl.maximum(total, 1e-20)
    places = token * TOP_K + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    # A row of NaN would choose the first experts, whose weights may not be needed by any other row.
    has_scores = tl.max((is_expert & (scores == scores)).to(tl.int32), axis=0) > 0
    tl.store(expert_ptr + places, tl.where(has_scores, experts, _NO_EXPERT), mask=is_chosen)
    tl.store(weight_ptr + places, weights * scale, mask=is_chosen)
