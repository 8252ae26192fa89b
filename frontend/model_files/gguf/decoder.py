"""Configuration keys that the architectures of GGUF files share."""

import math
from typing import Any

from octavo.frontend.model_files.gguf.metadata import GgufMetadata
from octavo.frontend.model_files.gguf.rope import rope_scaling
from octavo.protocol.errors import ConfigError

Config = dict[str, Any]
"""Keys of a `config.json`."""

_PARTIALLY_ROTATED = frozenset({"chatglm", "glm4", "glm4moe", "gptneox", "phi2", "phi3"})
"""Architectures that may rotate only a part of each head."""


def decoder(gguf: GgufMetadata) -> Config:
    """Return the keys of a model with RMS norms and rotary embedding, under their usual names.

    Raises:
        ConfigError: a key is missing or not supported.
    """
    hidden_size, num_heads = gguf.required("embedding_length"), gguf.required("attention.head_count")
    head_dim = gguf.get("attention.key_length", hidden_size // num_heads)
    if gguf.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError("heads of keys and values of different sizes are not supported")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": gguf.get("feed_forward_length"),
        "num_hidden_layers": gguf.required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": gguf.required("context_length"),
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
    } | _rotary(gguf, head_dim)


def _rotary(gguf: GgufMetadata, head_dim: int) -> Config:
    theta = gguf.get("rope.freq_base", 10000.0)
    num_rotated = gguf.get("rope.dimension_count", head_dim)
    config = {"rope_theta": theta, "rope_scaling": rope_scaling(gguf, theta, num_rotated)}
    if num_rotated != head_dim:
        if gguf.architecture not in _PARTIALLY_ROTATED:
            raise ConfigError(
                f"rotary embedding of {num_rotated} of {head_dim} dimensions is not supported for {gguf.architecture}"
            )
        share = num_rotated / head_dim
        # Rounded so that this fraction of the head is the same integer again.
        config["partial_rotary_factor"] = share if int(head_dim * share) == num_rotated else math.nextafter(share, 1)
    return config


def rotary_share(gguf: GgufMetadata) -> float:
    """Return the fraction of a head that is rotated."""
    share: float = decoder(gguf).get("partial_rotary_factor", 1.0)
    return share


def layer_types(gguf: GgufMetadata, period: int) -> list[str]:
    """Return the types of the layers. `period`: of layers with full attention, if the file does not say it."""
    num_layers, pattern = gguf.required("block_count"), gguf.per_layer("attention.sliding_window_pattern")
    pattern = period if pattern is None else pattern
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if len(pattern) != num_layers:
        raise ConfigError(f"a window pattern of {len(pattern)} layers for {num_layers} layers")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def has_bias(gguf: GgufMetadata) -> bool:
    """Return whether the query projections have biases."""
    return gguf.has_tensor("blk.0.attn_q.bias") or gguf.has_tensor("blk.0.attn_qkv.bias")


def granite(gguf: GgufMetadata) -> Config:
    """Return the scaling factors of Granite."""
    return {
        "attention_bias": has_bias(gguf),
        "attention_multiplier": gguf.number("attention.scale", 1.0),
        "embedding_multiplier": gguf.number("embedding_scale", 1.0),
        "residual_multiplier": gguf.number("residual_scale", 1.0),
        "logits_scaling": gguf.number("logit_scale", 1.0),
    }
