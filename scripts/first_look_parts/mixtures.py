"""The experts of a layer: their speed compared with the estimate, and whether bits of a token depend on the batch."""

from functools import partial
from typing import Any

import torch
from bench_gpu_parts.mixtures import MIXTURES, TINY, Mixture, MixtureName
from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.quantized_layers import weight_of
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of
from gpu_expert_estimates import estimate_layer, routed
from gpu_quantized_expert_estimates import estimate_layer as estimate_quantized_layer
from gpu_quantized_expert_estimates import expert_bytes as quantized_expert_bytes
from torch import Tensor

from first_look_parts.figures import cell_result, figure
from octavo.kernels.experts import PackedExperts
from octavo.kernels.experts.gpu import experts
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import LibraryLinear
from octavo.kernels.linear.gpu_product import gpu_of
from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.routing import Routing, RoutingRule
from octavo.kernels.routing.gpu import route

LEAST_S = 0.05
"""Minimum time of one measurement in seconds."""


@torch.inference_mode()
def mixture(name: MixtureName, rows: list[int], form: QuantizedName | None = None) -> dict[str, Any]:
    """Return the microseconds of routing and experts for each number of tokens, and the tokens whose bits differ.

    `form` is the format of the weights; `None` for 16 bits.
    """
    layer = MIXTURES[name] if IS_ON_GPU else TINY
    expert_bytes = quantized_expert_bytes(layer, form) if form else layer.weight_bytes()
    copies = num_copies(int(layer.num_experts * expert_bytes))
    weights = [_packed(layer, form) for _ in range(copies)]
    rule = RoutingRule(layer.num_experts, layer.top_k)
    x = normal(max(rows), layer.width)
    logits = normal(max(rows), layer.num_experts)

    def run(copy: int, num_tokens: int) -> Tensor:
        routing = Routing(*route(logits[:num_tokens], rule, None))
        return experts(x[:num_tokens], routing, weights[copy], None)

    whole = run(0, max(rows))
    differing = [num_tokens for num_tokens in rows if not torch.equal(run(0, num_tokens), whole[:num_tokens])]
    what = f"{name}, {form}" if form else name
    figures = []
    for num_tokens in rows:
        num_read = int((routed(layer, num_tokens) > 0).sum())
        num_bytes = int(num_read * expert_bytes) + 4 * num_tokens * layer.width
        key, title = f"experts-{what}-{num_tokens}", f"experts, {what}, {num_tokens} tokens"
        estimated_s = (
            estimate_quantized_layer(form, layer, num_tokens, "H200")
            if form
            else estimate_layer(layer, num_tokens, "H200")
        ).seconds
        figures.append(figure(key, title, "us", 1e6 * estimated_s, column="estimate"))
        replay = captured(partial(run, num_tokens=num_tokens), copies)
        spent_s = seconds_of(replay, LEAST_S) / copies
        bound = [(num_bytes, layer.flops(num_tokens))]
        figures.append(figure(key, title, "us", 1e6 * spent_s, seconds=spent_s, bound=bound))
        del replay
    title = f"experts, {what}: batches whose tokens have other bits, of {len(rows)}"
    figures.append(figure(f"bits-experts-{what}", title, "", len(differing), digits=0))
    lines = [f"BITS DIFFER, experts of {what}: in batches of {differing}"] if differing else []
    weights.clear()
    release_memory()
    return cell_result(figures, differing, lines)


def _packed(layer: Mixture, form: QuantizedName | None) -> PackedExperts:
    def product_of(num_outputs: int, num_inputs: int, bias: Tensor | None) -> LibraryLinear | QuantizedProduct:
        if form is None:
            weight = normal(num_outputs, num_inputs) * num_inputs**-0.5
            return LibraryLinear(weight, bias)
        device = torch.device(DEVICE)
        num_done = torch.zeros(1, dtype=torch.int32, device=device)  # number of finished splits; experts have none
        return QuantizedProduct(weight_of(form, num_outputs, num_inputs, device), bias, gpu_of(device), num_done)

    def weights(num_outputs: int, num_inputs: int, *, has_bias: bool) -> list[PackedLinear]:
        found = []
        for _ in range(layer.num_experts):
            product = product_of(num_outputs, num_inputs, normal(num_outputs) if has_bias else None)
            found.append(PackedLinear(num_inputs, num_outputs, torch.bfloat16, torch.device(DEVICE), product))
        return found

    return PackedExperts(
        layer.num_experts,
        weights(layer.inner, layer.width, has_bias=layer.has_bias),
        weights(layer.inner, layer.width, has_bias=layer.has_bias),
        weights(layer.width, layer.inner, has_bias=False),
        "clamped_swiglu" if layer.has_bias else "silu_and_mul",
        normal(layer.num_experts, layer.width) if layer.has_bias else None,
    )
