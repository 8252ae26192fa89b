"""The experts of a layer: how fast, beside the estimate, and whether a token has the same bits in every batch."""

from typing import Any

import torch
from bench_gpu_parts.mixtures import MIXTURES, TINY, Mixture, MixtureName
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of
from gpu_expert_estimates import estimate_layer, routed
from torch import Tensor

from first_look_parts.figures import cell_result, figure
from octavo.kernels.experts import PackedExperts
from octavo.kernels.experts.gpu import experts
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import new_packer
from octavo.kernels.routing import Routing, RoutingRule
from octavo.kernels.routing.gpu import route

LEAST_S = 0.05
"""Minimum time of one measurement."""


@torch.inference_mode()
def mixture(name: MixtureName, rows: list[int]) -> dict[str, Any]:
    """Return the microseconds of routing and experts for each number of tokens, and the tokens whose bits differ."""
    layer = MIXTURES[name] if IS_ON_GPU else TINY
    copies = num_copies(layer.num_experts * layer.weight_bytes())
    weights = [_packed(layer) for _ in range(copies)]
    rule = RoutingRule(layer.num_experts, layer.top_k)
    x = normal(max(rows), layer.width)
    logits = normal(max(rows), layer.num_experts)

    def run(copy: int, num_tokens: int) -> Tensor:
        routing = Routing(*route(logits[:num_tokens], rule, None))
        return experts(x[:num_tokens], routing, weights[copy], None)

    whole = run(0, max(rows))
    differing = [num_tokens for num_tokens in rows if not torch.equal(run(0, num_tokens), whole[:num_tokens])]
    figures = []
    for num_tokens in rows:
        num_read = int((routed(layer, num_tokens) > 0).sum())
        num_bytes = num_read * layer.weight_bytes() + 4 * num_tokens * layer.width
        key, title = f"experts-{name}-{num_tokens}", f"experts, {name}, {num_tokens} tokens"
        estimate = estimate_layer(layer, num_tokens, "H200")
        figures.append(figure(key, title, "us", 1e6 * estimate.seconds, column="estimate"))
        replay = captured(lambda copy, num_tokens=num_tokens: run(copy, num_tokens), copies)  # type: ignore[misc]
        spent_s = seconds_of(replay, LEAST_S) / copies
        bound = [(num_bytes, layer.flops(num_tokens))]
        figures.append(figure(key, title, "us", 1e6 * spent_s, seconds=spent_s, bound=bound))
        del replay
    title = f"experts, {name}: batches whose tokens have other bits, of {len(rows)}"
    figures.append(figure(f"bits-experts-{name}", title, "", len(differing), digits=0))
    lines = [f"BITS DIFFER, experts of {name}: in batches of {differing}"] if differing else []
    weights.clear()
    release_memory()
    return cell_result(figures, differing, lines)


def _packed(layer: Mixture) -> PackedExperts:
    packer = new_packer(is_batch_invariant=True)

    def weights(num_outputs: int, num_inputs: int, *, has_bias: bool) -> list[PackedLinear]:
        found = []
        for _ in range(layer.num_experts):
            weight, bias = normal(num_outputs, num_inputs) * num_inputs**-0.5, normal(num_outputs)
            product = packer.pack(weight, bias if has_bias else None, is_grouped=True)
            found.append(PackedLinear(num_inputs, num_outputs, weight.dtype, torch.device(DEVICE), product))
        return found

    return PackedExperts(
        layer.num_experts,
        weights(layer.inner, layer.width, has_bias=layer.has_bias),
        weights(layer.inner, layer.width, has_bias=layer.has_bias),
        weights(layer.width, layer.inner, has_bias=False),
        "clamped_swiglu" if layer.has_bias else "silu_and_mul",
        normal(layer.num_experts, layer.width) if layer.has_bias else None,
    )
