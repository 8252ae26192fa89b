"""The products with quantized weights that are compiled ahead of time, in the shapes of Llama-3.1-8B, and those of
experts. See `kernel_launches`."""

from collections.abc import Callable

import torch
import triton
from bench_gpu_parts.mixtures import MIXTURES, MixtureName
from bench_gpu_parts.quantized import FORMATS, QUANTIZED_MIXTURES, QuantizedName
from bench_gpu_parts.quantized_layers import weight_of
from torch import Tensor

from octavo.kernels.experts import PackedExperts
from octavo.kernels.experts import gpu as experts
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_tiles import H100, Gpu
from octavo.kernels.routing import Routing

META = torch.device("meta")
GPUS = {
    80: Gpu(108, 163 << 10, has_descriptors=False),
    89: Gpu(142, 99 << 10, has_descriptors=False),
    90: H100,
}
NUM_INPUTS = NUM_OUTPUTS = 4096
ROWS = (16, 8192)
EXPERTS: dict[QuantizedName, MixtureName] = {**QUANTIZED_MIXTURES, "Q8_0": "Qwen3-30B-A3B", "w8a8": "Qwen3-30B-A3B"}
TOKENS = (16, 8192)
TILES_OF_64_ROWS: tuple[QuantizedName, int] = ("mxfp4", 200)
"""A launch whose tiles have 64 rows: those of GPT-OSS spill on Hopper."""


def multiply(name: QuantizedName, num_rows: int) -> Callable[[], object]:
    """Return a launch that multiplies rows with a weight."""

    def launch() -> Tensor:
        architecture = triton.runtime.driver.active.get_current_target().arch
        weight = weight_of(name, NUM_OUTPUTS, NUM_INPUTS, META)
        num_done = torch.empty(132, dtype=torch.int32, device=META)
        rows = torch.empty(num_rows, NUM_INPUTS, dtype=torch.bfloat16, device=META)
        return QuantizedProduct(weight, None, GPUS[architecture], num_done)(rows)

    return launch


def multiply_experts(name: QuantizedName, num_tokens: int) -> Callable[[], object]:
    """Return a launch that multiplies tokens with their experts."""
    layer = MIXTURES[EXPERTS[name]]

    def launch() -> Tensor:
        gpu = GPUS[triton.runtime.driver.active.get_current_target().arch]

        def weights(num_outputs: int, num_inputs: int, *, has_bias: bool) -> list[PackedLinear]:
            bias = torch.empty(num_outputs, dtype=torch.bfloat16, device=META) if has_bias else None
            num_done = torch.empty(132, dtype=torch.int32, device=META)
            product = QuantizedProduct(weight_of(name, num_outputs, num_inputs, META), bias, gpu, num_done)
            return [PackedLinear(num_inputs, num_outputs, torch.bfloat16, META, product)] * layer.num_experts

        packed = PackedExperts(
            layer.num_experts,
            weights(layer.inner, layer.width, has_bias=layer.has_bias),
            weights(layer.inner, layer.width, has_bias=layer.has_bias),
            weights(layer.width, layer.inner, has_bias=False),
            "clamped_swiglu" if layer.has_bias else "silu_and_mul",
        )
        routing = Routing(
            torch.empty(num_tokens, layer.top_k, dtype=torch.int32, device=META),
            torch.empty(num_tokens, layer.top_k, device=META),
        )
        return experts.experts(
            torch.empty(num_tokens, layer.width, dtype=torch.bfloat16, device=META), routing, packed, None
        )

    return launch


LAUNCHES = {
    f"quantized_linear, {name}, {num_rows} rows": multiply(name, num_rows) for name in FORMATS for num_rows in ROWS
} | {
    f"quantized experts, {name}, {num_tokens} tokens": multiply_experts(name, num_tokens)
    for name, num_tokens in (*((name, num_tokens) for name in EXPERTS for num_tokens in TOKENS), TILES_OF_64_ROWS)
}
ONLY_ON = {
    name: (89, 90)
    if any(name.split(", ")[1] == form for form in FORMATS if FORMATS[form].kind == "f8")
    else (80, 89, 90)
    for name in LAUNCHES
}
"""An Ampere multiplies no float8; for Blackwell for data centres there are no kernels."""
