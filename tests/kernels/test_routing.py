"""`route`: the experts of the definition, whatever the batch."""

import pytest
import torch
from kernel_checks import assert_close
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.routing import RoutingRule, cases, native, reference, route

NUM_TOKENS = 60


def bias_of(name: str) -> Tensor | None:
    return cases.bias(cases.CASES[name]) if name in cases.WITH_BIAS else None


def native_route(
    library: NativeLibrary, logits: Tensor, rule: RoutingRule, bias: Tensor | None, num_threads: int = 1
) -> tuple[Tensor, Tensor]:
    experts = torch.full((len(logits), rule.top_k), -1, dtype=torch.int32)
    weights = torch.full((len(logits), rule.top_k), -1.0)
    call = native.arguments(Matrix.of(logits), rule, bias, Matrix.of(experts), Matrix.of(weights))
    run(library, "route", call, num_rows=len(logits), num_threads=num_threads)
    return experts, weights


@pytest.mark.parametrize("name", cases.CASES)
def test_native_routing(native_library: NativeLibrary, name: str) -> None:
    rule, bias = cases.CASES[name], bias_of(name)
    logits = cases.logits(NUM_TOKENS, rule)
    experts, weights = native_route(native_library, logits, rule, bias)
    expected_experts, expected_weights = reference.route(logits, rule, bias)
    assert torch.equal(experts, expected_experts)
    assert_close(weights, expected_weights, 1e-6)
    alone = native_route(native_library, logits[7:9], rule, bias, num_threads=3)
    assert torch.equal(alone[0], experts[7:9]) and torch.equal(alone[1], weights[7:9])


@pytest.mark.parametrize("name", cases.CASES)
def test_routing_through_torch(name: str) -> None:
    rule, bias = cases.CASES[name], bias_of(name)
    logits = cases.logits(NUM_TOKENS, rule)
    routing = route(logits, rule, bias)
    expected_experts, expected_weights = reference.route(logits, rule, bias)
    assert routing.expert_TK.dtype == torch.int32 and torch.equal(routing.expert_TK, expected_experts)
    assert_close(routing.weight_TK, expected_weights, 1e-6)
    alone = route(logits[7:9], rule, bias)
    assert torch.equal(alone.weight_TK, routing.weight_TK[7:9])


def test_logits_far_from_zero_have_weights(native_library: NativeLibrary) -> None:
    """Numbers that float32 rounds to 0 or that overflow an exponential."""
    for score in ("softmax", "sigmoid"):
        rule = RoutingRule(4, 2, score)
        for logits in (torch.tensor([[-300.0, -301.0, -400.0, -500.0]]), torch.tensor([[300.0, 299.0, 0.0, -300.0]])):
            for _, weights in (native_route(native_library, logits, rule, None), vars_of(logits, rule)):
                assert weights.isfinite().all() and (weights >= 0).all()


def test_an_offset_of_the_sum_matters_for_small_sigmoids(native_library: NativeLibrary) -> None:
    from transformers import Lfm2MoeConfig
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

    rule = RoutingRule(8, 3, "sigmoid", sum_offset=1e-6, scale=1.5)
    router = Lfm2MoeTopKRouter(
        Lfm2MoeConfig(
            hidden_size=8, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, routed_scaling_factor=1.5
        )
    )
    router.weight.data.copy_(torch.eye(8))
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) - 12.0
    with torch.inference_mode():
        _, weights, experts = router(logits, torch.zeros(8))
    order = experts.argsort(dim=1)
    for ours, our_weights in (native_route(native_library, logits, rule, None), vars_of(logits, rule)):
        assert torch.equal(ours.long(), experts.gather(1, order))
        assert_close(our_weights, weights.gather(1, order), 1e-6)
        assert our_weights.sum(1).max() < 1.5 and our_weights.sum(1).min() < 1.49


def vars_of(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    routing = route(logits, rule)
    return routing.expert_TK, routing.weight_TK


def test_rules_that_contradict_themselves_are_rejected() -> None:
    for arguments in (
        {"num_experts": 4, "top_k": 5},
        {"num_experts": 2000, "top_k": 2},
        {"num_experts": 6, "top_k": 2, "num_groups": 4},
        {"num_experts": 8, "top_k": 5, "num_groups": 4, "num_kept_groups": 2},
        {"num_experts": 8, "top_k": 2, "num_groups": 2, "num_kept_groups": 3},
        {"num_experts": 4, "top_k": 2, "num_groups": 4, "num_kept_groups": 2, "group_score": "top2_sum"},
    ):
        with pytest.raises(ShapeError):
            RoutingRule(**arguments)
    with pytest.raises(ShapeError, match="logits of shape"):
        route(torch.zeros(2, 3), RoutingRule(4, 2))
    with pytest.raises(ShapeError, match="bias"):
        route(torch.zeros(2, 4), RoutingRule(4, 2), torch.zeros(3))
