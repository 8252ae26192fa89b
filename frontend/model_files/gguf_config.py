"""GGUF metadata to `config.json` and `generation_config.json`, by the key names of the GGUF specification.

Source: docs/gguf.md of the ggml project. Knows nothing of tokenizers or tensors' contents but for the
rotary frequency factors.
"""

import math
from collections.abc import Mapping, Set
from typing import Any

from octavo.protocol.errors import ConfigError

PHASE = "reading the GGUF file"

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
}
"""`general.architecture` to `architectures[0]` and `model_type`. Mistral is stored as llama."""

_FILE_TYPE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
"""`general.file_type` (llama.cpp's LLAMA_FTYPE); all other types are quantized and map to bfloat16."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""Parameters of Llama 3's rotary scaling, the same in every published checkpoint."""


def hf_config(metadata: Mapping[str, Any], tensor_names: Set[str], rope_factors: list[float] | None) -> dict[str, Any]:
    """Return the model's `config.json`, reconstructed from the metadata.

    Args:
        metadata: the file's key-value pairs.
        tensor_names: of all tensors; tied weights and biases are detected from them.
        rope_factors: the tensor `rope_freqs.weight`: divisors of the rotary frequencies, if present.

    Raises:
        ConfigError: an unsupported architecture or feature, or a missing key.
    """
    arch = _required(metadata, "general.architecture")
    if arch not in _ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {arch!r} is not supported", phase=PHASE, hint=f"one of {', '.join(_ARCHITECTURES)}"
        )
    num_experts = metadata.get(f"{arch}.expert_count")
    if num_experts and arch not in ("llama", "qwen2moe", "qwen3moe"):
        raise ConfigError(f"GGUF architecture {arch!r} with experts is not supported", phase=PHASE)
    architecture, model_type = _ARCHITECTURES[arch]
    if num_experts and arch == "llama":
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(metadata, arch),
        "torch_dtype": _FILE_TYPE_DTYPES.get(metadata.get("general.file_type", -1), "bfloat16"),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if arch == "gpt2":
        return config | _gpt2(metadata)
    experts = _experts(metadata, arch) if num_experts else {}
    return config | _llama_family(metadata, arch, tensor_names, rope_factors) | experts


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `generation_config.json`: the tokens that end a turn, and the author's sampling defaults."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    sampling = {
        "temperature": "general.sampling.temp",
        "top_p": "general.sampling.top_p",
        "top_k": "general.sampling.top_k",
        "min_p": "general.sampling.min_p",
        "repetition_penalty": "general.sampling.penalty_repeat",
    }
    config: dict[str, Any] = {name: metadata[key] for name, key in sampling.items() if key in metadata}
    # A dict keeps the order and drops duplicates.
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return config


def _llama_family(
    metadata: Mapping[str, Any], arch: str, tensor_names: Set[str], rope_factors: list[float] | None
) -> dict[str, Any]:
    hidden_size = _required(metadata, f"{arch}.embedding_length")
    num_heads = _required(metadata, f"{arch}.attention.head_count")
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden_size // num_heads)
    rope_dim = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if rope_dim != head_dim:
        raise ConfigError(f"rotary embedding of {rope_dim} of {head_dim} dimensions is not supported", phase=PHASE)
    theta = metadata.get(f"{arch}.rope.freq_base", 10000.0)
    max_positions = _required(metadata, f"{arch}.context_length")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": None if "moe" in arch else _required(metadata, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _required(metadata, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": _short(_required(metadata, f"{arch}.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, arch, rope_factors, theta, head_dim),
        "sliding_window": metadata.get(f"{arch}.attention.sliding_window"),
        # Biases are always present in Qwen2 and optional in Llama.
        **({"attention_bias": "blk.0.attn_q.bias" in tensor_names} if arch == "llama" else {}),
    }


def _experts(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    chosen = {"num_experts_per_tok": _required(metadata, f"{arch}.expert_used_count")}
    if arch == "llama":
        return chosen | {"num_local_experts": _required(metadata, f"{arch}.expert_count")}
    config = chosen | {
        "num_experts": _required(metadata, f"{arch}.expert_count"),
        "moe_intermediate_size": _required(metadata, f"{arch}.expert_feed_forward_length"),
        "intermediate_size": metadata.get(f"{arch}.feed_forward_length"),
        "norm_topk_prob": arch == "qwen3moe",  # not stored: llama.cpp decides it by the architecture
    }
    if arch == "qwen2moe":
        config["shared_expert_intermediate_size"] = _required(metadata, f"{arch}.expert_shared_feed_forward_length")
    return config


def _gpt2(metadata: Mapping[str, Any]) -> dict[str, Any]:
    hidden_size = _required(metadata, "gpt2.embedding_length")
    return {
        "n_embd": hidden_size,
        "n_inner": metadata.get("gpt2.feed_forward_length", 4 * hidden_size),
        "n_layer": _required(metadata, "gpt2.block_count"),
        "n_head": _required(metadata, "gpt2.attention.head_count"),
        "n_positions": _required(metadata, "gpt2.context_length"),
        "layer_norm_epsilon": _short(_required(metadata, "gpt2.attention.layer_norm_epsilon")),
        "activation_function": "gelu_new",
    }


def _rope_scaling(
    metadata: Mapping[str, Any], arch: str, factors: list[float] | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if factors is not None:
        return _llama3_scaling(factors, theta, head_dim)
    if kind == "none":
        return None
    factor = _required(metadata, f"{arch}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _required(metadata, f"{arch}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ConfigError(f"rotary scaling of type {kind!r} is not supported", phase=PHASE)


def _llama3_scaling(factors: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling; the file stores the frequency divisors themselves."""
    factor = float(round(max(factors), 4))
    expected = _llama3_factors(factor, theta, head_dim)
    if len(factors) != len(expected) or not all(
        math.isclose(one, other, rel_tol=1e-3) for one, other in zip(factors, expected, strict=True)
    ):
        raise ConfigError(
            "the file has rotary frequency factors (rope_freqs.weight) that are not Llama 3's",
            phase=PHASE,
            hint="use the model's safetensors files",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(factor: float, theta: float, head_dim: int) -> list[float]:
    """Return the divisors: `factor` for long wavelengths, 1 for short ones, interpolated between."""
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        turns = _LLAMA3_CONTEXT / wavelength
        blend = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors


def _vocab_size(metadata: Mapping[str, Any], arch: str) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    size: int = len(tokens) if tokens else _required(metadata, f"{arch}.vocab_size")
    return size


def _short(value: float) -> float:
    """Round to the precision of float32: 1e-5, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ConfigError(f"the GGUF file has no {key}", phase=PHASE)
    return metadata[key]
