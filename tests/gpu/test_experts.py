"""Mixtures of experts on a GPU: the experts of the definition, and the same bits for a token in any batch."""

from functools import partial

import pytest
import torch
from expert_layers import pack_experts
from kernel_checks import assert_close, random
from pairwise import pairwise
from torch import Tensor
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.experts import PackedExperts, cases, reference
from octavo.kernels.experts import gpu as experts_gpu
from octavo.kernels.experts.cases import Layer
from octavo.kernels.linear import PackedLinear, gpu
from octavo.kernels.routing import NO_EXPERT, Routing, RoutingRule
from octavo.kernels.routing import cases as routing_cases
from octavo.kernels.routing import gpu as routing_gpu
from octavo.kernels.routing import reference as routing_reference

NAMES = [name for name in cases.CASES if not (IS_INTERPRETING and name == "Granite")]
"""Granite has so many tiles that the interpreter takes ten seconds."""


def pack(device: torch.device, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    product = gpu.new_packer(is_batch_invariant=True).pack(weight, bias, is_grouped=True)
    return PackedLinear(weight.shape[1], weight.shape[0], weight.dtype, weight.device, product)


def packed_on(
    device: torch.device, layer: Layer, weights: dict[str, Tensor], dtype: torch.dtype, own: range | None = None
) -> PackedExperts:
    on_device = {name: tensor.to(device) for name, tensor in weights.items()}
    return pack_experts(layer, on_device, partial(pack, device), dtype, own)


def routing_of(logits: Tensor, rule: RoutingRule) -> Routing:
    experts, weights = routing_reference.route(logits.cpu(), rule, None)
    return Routing(experts.to(logits.device), weights.to(logits.device))


@pytest.mark.parametrize("name", routing_cases.CASES)
def test_route(device: torch.device, seed: int, name: str) -> None:
    rule = routing_cases.CASES[name]
    bias = routing_cases.bias(rule) if name in routing_cases.WITH_BIAS else None
    logits = routing_cases.logits(5, rule, seed)
    on_device = logits.to(device), rule, None if bias is None else bias.to(device)
    experts, weights = (found.cpu() for found in routing_gpu.route(*on_device))
    expected_experts, expected_weights = routing_reference.route(logits, rule, bias)
    assert torch.equal(experts, expected_experts)
    assert_close(weights, expected_weights, 1e-6)
    alone = routing_gpu.route(on_device[0][3:4], *on_device[1:])
    assert torch.equal(alone[0].cpu(), experts[3:4]) and torch.equal(alone[1].cpu(), weights[3:4])


@pytest.mark.parametrize(("score", "extreme"), [("softmax", [3, 4]), ("sigmoid", [0, 2])])
def test_a_token_without_numbers_has_no_experts(device: torch.device, score: str, extreme: list[int]) -> None:
    """Padding, and requests that fail alone. Numbers that float32 rounds to 0 or 1 are equal: the first ones win."""
    rule = RoutingRule(6, 2, score, num_groups=2, num_kept_groups=1)
    logits = torch.tensor([[float("nan")] * 6, [-300.0, -301.0, 300.0, 301.0, float("-inf"), 0.0]], device=device)
    experts, weights = (found.cpu() for found in routing_gpu.route(logits, rule, None))
    assert experts.tolist() == [[NO_EXPERT, NO_EXPERT], extreme]
    assert weights[0].isnan().all() and weights[1].isfinite().all()


@pytest.mark.parametrize(("name", "dtype"), pairwise(NAMES, list(cases.TOLERANCES)), ids=str)
def test_experts(device: torch.device, seed: int, name: str, dtype: torch.dtype) -> None:
    layer = cases.CASES[name]
    weights = {key: values.to(dtype) for key, values in cases.weights(layer, seed).items()}
    packed = packed_on(device, layer, weights, dtype)
    for num_tokens in (1, 11):
        x = random(num_tokens, layer.width, dtype=dtype, seed=seed + 1)
        routing = routing_of(random(num_tokens, layer.num_experts, seed=seed + 2), layer.rule)
        on_device = Routing(routing.expert_TK.to(device), routing.weight_TK.to(device))
        out = experts_gpu.experts(x.to(device), on_device, packed, None)
        assert out.dtype == dtype
        expected = reference.experts(x, routing.expert_TK, routing.weight_TK, activation=layer.activation, **weights)
        assert_close(out.cpu().float(), expected, cases.TOLERANCES[dtype])


def test_a_token_has_the_same_bits_in_any_batch(device: torch.device, seed: int) -> None:
    """In tiles of 64 rows and of 128, and at any place in them."""
    layer = Layer(2, 2, 40, 48)
    packed = packed_on(device, layer, cases.weights(layer, seed), torch.bfloat16)
    x = random(70, layer.width, dtype=torch.bfloat16, seed=seed).to(device)
    logits = random(70, layer.num_experts, seed=seed + 1).to(device)

    def layer_of(tokens: Tensor) -> Tensor:
        return experts_gpu.experts(x[tokens], routing_of(logits[tokens], layer.rule), packed, None)

    tokens = torch.arange(70, device=device)
    whole = layer_of(tokens)
    shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(seed)).to(device)
    for some in (tokens[:1], tokens[69:], shuffled[:9], shuffled[:66]):
        assert torch.equal(layer_of(some), whole[some]), len(some)


def test_weights_of_experts_without_tokens_are_not_read(device: torch.device, seed: int) -> None:
    layer = Layer(4, 2, 32, 48)
    weights = cases.weights(layer, seed)
    x = random(3, layer.width, seed=seed).to(device)
    routing = Routing(
        torch.tensor([[0, 2]] * 3, dtype=torch.int32, device=device), torch.full((3, 2), 0.5, device=device)
    )
    out = experts_gpu.experts(x, routing, packed_on(device, layer, weights, torch.float32), None)
    for name in weights:
        weights[name][[1, 3]] = torch.nan
    unread = packed_on(device, layer, weights, torch.float32)
    # Addresses that nobody may read.
    tables = experts_gpu._weights(unread).tables
    for table in tables:
        table[[1, 3]] = 0
    assert torch.equal(experts_gpu.experts(x, routing, unread, None), out)
    padding = torch.full((1, 2), NO_EXPERT, dtype=torch.int32, device=device)
    padded = Routing(
        torch.cat((routing.expert_TK, padding)),
        torch.cat((routing.weight_TK, torch.full_like(padding, torch.nan, dtype=torch.float32))),
    )
    with_padding = experts_gpu.experts(torch.cat((x, x[:1])), padded, unread, None)
    assert torch.equal(with_padding[:3], out)
    assert with_padding[3].isnan().all()


def test_ranks_with_some_of_the_experts_leave_zeros_for_the_others(device: torch.device, seed: int) -> None:
    layer = Layer(4, 2, 32, 48)
    weights = cases.weights(layer, seed)
    x = random(4, layer.width, seed=seed).to(device)
    routing = routing_of(random(4, layer.num_experts, seed=seed + 1).to(device), layer.rule)
    parts: list[Tensor] = []

    def first(output: Tensor) -> Tensor:
        parts.append(output)
        return output

    owners = [packed_on(device, layer, weights, torch.float32, own) for own in (range(1), range(1, 4))]
    experts_gpu.experts(x, routing, owners[0], first)
    together = experts_gpu.experts(x, routing, owners[1], lambda output: output + parts[0])
    alone = experts_gpu.experts(x, routing, packed_on(device, layer, weights, torch.float32), None)
    assert torch.equal(together, alone)


def test_no_tokens(device: torch.device) -> None:
    layer = cases.CASES["small"]
    packed = packed_on(device, layer, cases.weights(layer), torch.float32)
    routing = Routing(*routing_gpu.route(torch.empty(0, layer.num_experts, device=device), layer.rule, None))
    assert experts_gpu.experts(torch.empty(0, layer.width, device=device), routing, packed, None).shape == (0, 64)
