"""The minimum time of a step or workload, computed from a GPU's ceilings.

In a step all weights are read once and every token is multiplied with all of them; the longer of the two counts. Then
each request's keys and values are read, or multiplied with its queries. Norms, activations and sampling are left out.
"""

from dataclasses import dataclass

from bench_cpu_parts.roofline import ModelCost
from bench_cpu_parts.workloads import Workload

from bench_gpu_parts.quantized import FORMATS, LAYER, MODEL, QuantizedName
from bench_gpu_parts.shapes import SHAPES, weight_shapes


@dataclass(frozen=True)
class GpuCeilings:
    """Measured rates of a GPU, per second."""

    copy_bytes: float
    """Bytes read and written by a copy within the GPU's memory."""
    matrix_flops: float
    """Operations of a large product of random bfloat16 matrices."""


def decode_seconds(cost: ModelCost, ceilings: GpuCeilings, batch: int, context: int) -> float:
    """Return the minimum time of a step in which `batch` requests of `context` tokens decode."""
    products = _products_seconds(cost, ceilings, num_tokens=batch, num_sampled=batch)
    return products + batch * context * cost.kv_bytes / ceilings.copy_bytes


def prefill_seconds(cost: ModelCost, ceilings: GpuCeilings, num_tokens: int) -> float:
    """Return the minimum time of a step over a complete prompt."""
    attention = cost.attention_flops * num_tokens * (num_tokens + 1) / 2
    return _products_seconds(cost, ceilings, num_tokens, num_sampled=1) + attention / ceilings.matrix_flops


def mixed_seconds(cost: ModelCost, ceilings: GpuCeilings, batch: int, context: int, chunk: int) -> float:
    """Return the bound of a step with decodes and the first chunk of a prompt."""
    products = _products_seconds(cost, ceilings, num_tokens=batch + chunk, num_sampled=batch)
    chunk_attention = cost.attention_flops * chunk * (chunk + 1) / 2 / ceilings.matrix_flops
    return products + batch * context * cost.kv_bytes / ceilings.copy_bytes + chunk_attention


def workload_seconds(cost: ModelCost, ceilings: GpuCeilings, workload: Workload) -> float:
    """Return the minimum time of requests that start together: all prompts, then one step for each further token."""
    lengths = [len(prompt) for prompt in workload.prompts]
    seconds = sum(prefill_seconds(cost, ceilings, length) for length in lengths)
    running = sorted(zip(workload.max_tokens, lengths, strict=True), reverse=True)
    for step in range(1, max(workload.max_tokens)):
        while running[-1][0] <= step:
            running.pop()
        num_seen = sum(length + step for _, length in running)
        seconds += _products_seconds(cost, ceilings, len(running), len(running))
        seconds += num_seen * cost.kv_bytes / ceilings.copy_bytes
    return seconds


def quantized_seconds(ceilings: GpuCeilings, name: QuantizedName, num_rows: int) -> float:
    """Return the bound of a layer's products with quantized weights; 8-bit numbers are multiplied at twice the rate."""
    form, shapes = FORMATS[name], weight_shapes(SHAPES[MODEL])
    matrix_flops = ceilings.matrix_flops * (2 if form.kind in ("s8", "f8") else 1)
    return sum(
        max(
            (form.weight_bytes(n, k) + 2 * num_rows * (n + k)) / ceilings.copy_bytes,
            2.0 * num_rows * n * k / matrix_flops,
        )
        for n, k in (shapes[part] for part in LAYER)
    )


def decode_attention_seconds(
    ceilings: GpuCeilings, batch: int, context: int, num_kv_heads: int, head_dim: int
) -> float:
    """Return the bound of one layer's attention of a decode step: its keys and values in 16 bits, read once."""
    return batch * context * 2 * num_kv_heads * head_dim * 2 / ceilings.copy_bytes


def prefill_attention_seconds(ceilings: GpuCeilings, num_tokens: int, num_heads: int, head_dim: int) -> float:
    """Return the bound of one layer's causal attention over a complete prompt."""
    return 4 * num_heads * head_dim * num_tokens * (num_tokens + 1) / 2 / ceilings.matrix_flops


def _products_seconds(cost: ModelCost, ceilings: GpuCeilings, num_tokens: int, num_sampled: int) -> float:
    flops = num_tokens * cost.layer_flops + num_sampled * cost.head_flops
    return max(cost.weight_bytes / ceilings.copy_bytes, flops / ceilings.matrix_flops)
