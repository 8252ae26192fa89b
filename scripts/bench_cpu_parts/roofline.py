"""The minimum time of a workload on this machine: its operations or bytes, divided by a ceiling.

A step reads every weight once and each request's keys and values; every token is multiplied with every weight.
Whichever of the two takes longer is the bound. Norms, activations and sampling are left out, so it stays a lower bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench_cpu_parts.ceilings import Ceilings
from bench_cpu_parts.workloads import Workload

_KV_BYTES = 2  # per number in the cache: bfloat16 or float16


@dataclass(frozen=True)
class ModelCost:
    """The cost of a decoder-only model, computed from its sizes."""

    weight_bytes: float
    """Bytes read in every step: all matrices including the head; the embedding is negligible."""
    layer_flops: float
    """Operations per token in products with weights, without the head."""
    head_flops: float
    """Operations of the head per sampled token."""
    attention_flops: float
    """Operations of attention per token and attended token."""
    kv_bytes: float
    """Bytes of one token in the cache."""
    is_quantized: bool
    """Whether weights are multiplied as 8-bit integers rather than as bfloat16."""


def model_cost(config: dict[str, Any], bits_per_weight: float) -> ModelCost:
    """Return the costs of a Llama, Qwen2 or Qwen3-MoE shape from its `config.json`.

    In a mixture of experts, only the experts of one token count: a step reads at least those.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q_size, kv_size = heads * head_dim, config["num_key_value_heads"] * head_dim
    inner = config.get("moe_intermediate_size", 0) * config.get("num_experts_per_tok", 0) or config["intermediate_size"]
    layer_weights = layers * hidden * (2 * q_size + 2 * kv_size + 3 * inner)
    head_weights = hidden * config["vocab_size"]
    return ModelCost(
        weight_bytes=(layer_weights + head_weights) * bits_per_weight / 8,
        layer_flops=2 * layer_weights,
        head_flops=2 * head_weights,
        attention_flops=4 * layers * q_size,
        kv_bytes=2 * layers * kv_size * _KV_BYTES,
        is_quantized=bits_per_weight < 16,
    )


def least_seconds(cost: ModelCost, ceilings: Ceilings, workloads: Iterable[Workload]) -> float | None:
    """Return the bound of workloads run in sequence; `None` if the machine's dot rate is unknown."""
    dot_rate = ceilings.int8_ops if cost.is_quantized else ceilings.bf16_flops
    if not dot_rate:
        return None
    return sum(_least_seconds(cost, ceilings.read_bytes, dot_rate, workload) for workload in workloads)


def _least_seconds(cost: ModelCost, read_rate: float, dot_rate: float, workload: Workload) -> float:
    flops, kv_bytes = 0.0, 0.0
    for number, (prompt, max_tokens) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
        first = workload.shared_prefix_len if number else 0
        last = len(prompt) + max_tokens - 1  # the last generated token is never an input
        flops += (last - first) * cost.layer_flops + max_tokens * cost.head_flops
        flops += _positions_seen(first, last) * cost.attention_flops
        kv_bytes += _positions_seen(len(prompt), last) * cost.kv_bytes
    num_steps = max(workload.max_tokens)
    return max(flops / dot_rate, (num_steps * cost.weight_bytes + kv_bytes) / read_rate)


def _positions_seen(first: int, last: int) -> float:
    """Return how many tokens the positions `first` to `last` (exclusive) attend to, including themselves."""
    return (last * (last + 1) - first * (first + 1)) / 2
