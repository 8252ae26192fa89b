"""The shapes of the measured models, as in their `config.json`. Their weights are random."""

import json
from pathlib import Path
from typing import Any, Literal

ShapeName = Literal["Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B"]

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "vocab_size": 128256,
}
_EVERY: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}

SHAPES: dict[ShapeName, dict[str, Any]] = {
    "Qwen3-0.6B": _EVERY
    | _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": _EVERY
    | _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": _EVERY
    | _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-7B": _EVERY
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "Qwen3-8B": _EVERY
    | _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": _EVERY
    | _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}

TINY: dict[str, Any] = SHAPES["Qwen3-0.6B"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
}
"""Configuration of a tiny model, whose step time is the host time."""


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each product of a model, in the form that octavo multiplies."""
    width, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    return {
        "qkv": ((heads + 2 * config["num_key_value_heads"]) * head_dim, width),
        "out": (width, heads * head_dim),
        "gate_up": (2 * config["intermediate_size"], width),
        "down": (width, config["intermediate_size"]),
        "head": (config["vocab_size"], width),
    }


def write_model(config: dict[str, Any], directory: Path) -> Path:
    """Write a model without weights and tokenizer, for `load_format="dummy"`; return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
