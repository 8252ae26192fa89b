"""Converts `params.json` of Mistral's own format to `config.json`.

Source: the arguments of the model in the public `mistral-inference` package.
"""

from typing import Any

from octavo.protocol.errors import ConfigError

_NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
"""Names of the keys that every file has."""
_OPTIONAL = {"head_dim": "head_dim", "n_kv_heads": "num_key_value_heads"}
_HARMLESS = frozenset({"max_batch_size", "model_type", "causal", "use_biases"})
_MAX_POSITIONS = 128_000
"""Default if the file has no limit, as in vLLM."""
_BOS, _EOS = 1, 2
"""Token ids in every tokenizer of Mistral's format."""


def hf_config(params: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a Mistral or Mixtral model.

    Raises:
        ConfigError: a key is missing or unknown.
    """
    if missing := sorted(_NAMES.keys() - params.keys()):
        raise ConfigError(f"params.json has no {', '.join(missing)}")
    _check_known(params)
    config = {ours: params[theirs] for theirs, ours in _NAMES.items()}
    config |= {ours: params[theirs] for theirs, ours in _OPTIONAL.items() if params.get(theirs) is not None}
    moe = params.get("moe")
    config |= {
        "architectures": ["MixtralForCausalLM" if moe else "MistralForCausalLM"],
        "model_type": "mixtral" if moe else "mistral",
        "max_position_embeddings": params.get("max_position_embeddings") or params.get("max_seq_len") or _MAX_POSITIONS,
        "rope_theta": _theta(params),
        "sliding_window": params.get("sliding_window"),
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
        "torch_dtype": "bfloat16",
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
    }
    if moe:
        config |= {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
    return config


def _theta(params: dict[str, Any]) -> float:
    theta = params.get("rope_theta")
    if theta is not None:
        return float(theta)
    if params.get("sliding_window"):
        return 10000.0  # value of the first Mistral, whose file does not contain it
    raise ConfigError("params.json has no rope_theta", hint="""add it, for example "rope_theta": 1000000.0""")


def _check_known(params: dict[str, Any]) -> None:
    known = {
        *_NAMES,
        *_OPTIONAL,
        *_HARMLESS,
        *("max_position_embeddings", "max_seq_len", "moe", "rope_theta", "sliding_window", "tied_embeddings"),
    }
    unknown = sorted(key for key, value in params.items() if key not in known and value is not None)
    moe = params.get("moe")
    if moe is not None and (not isinstance(moe, dict) or set(moe) != {"num_experts", "num_experts_per_tok"}):
        unknown.append("moe")
    if params.get("use_biases") or params.get("causal") is False:
        unknown += [key for key in ("use_biases", "causal") if key in params]
    if unknown:
        values = ", ".join(f"{key} ({params[key]!r:.40})" for key in unknown)
        raise ConfigError(
            f"params.json has {values}, which octavo does not know and which may change what the model computes",
            hint="use the model's files in Hugging Face layout: --config-format hf --load-format safetensors",
        )
