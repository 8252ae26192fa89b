"""Converts GGUF metadata to `config.json` and `generation_config.json`. Reads the names of tensors, not their data."""

from collections.abc import Mapping, Set
from typing import Any

from octavo.frontend.model_files.gguf.families import FAMILIES
from octavo.frontend.model_files.gguf.metadata import GgufMetadata
from octavo.protocol.errors import ConfigError

_FILE_TYPE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
"""`general.file_type` (llama.cpp's LLAMA_FTYPE); all other types are quantized and map to bfloat16."""


def hf_config(
    fields: Mapping[str, Any], tensor_names: Set[str], rope_factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Return the model's `config.json`, reconstructed from the metadata.

    Args:
        fields: the file's key-value pairs.
        tensor_names: names of all tensors; tied weights and biases are detected from them.
        rope_factors: the tensors with divisors of the rotary frequencies, by name.

    Raises:
        ConfigError: an unsupported architecture or feature, or a missing or unknown key.
    """
    gguf = GgufMetadata(fields, tensor_names, rope_factors)
    family = FAMILIES.get(gguf.architecture)
    if family is None:
        raise ConfigError(
            f"GGUF architecture {gguf.architecture!r} is not supported", hint=f"one of {', '.join(sorted(FAMILIES))}"
        )
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(gguf),
        "torch_dtype": _FILE_TYPE_DTYPES.get(fields.get("general.file_type", -1), "bfloat16"),
        "tie_word_embeddings": not gguf.has_tensor("output.weight"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    } | family.config(gguf)
    gguf.reject_unread()
    return config


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `generation_config.json`: the tokens that end a turn, and the author's sampling defaults."""
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    sampling = {
        "temperature": "general.sampling.temp",
        "top_p": "general.sampling.top_p",
        "top_k": "general.sampling.top_k",
        "min_p": "general.sampling.min_p",
        "repetition_penalty": "general.sampling.penalty_repeat",
    }
    config: dict[str, Any] = {name: fields[key] for name, key in sampling.items() if key in fields}
    # A dict keeps the order and drops duplicates.
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return config


def _vocab_size(gguf: GgufMetadata) -> int:
    tokens = gguf.fields.get("tokenizer.ggml.tokens")
    size: int = len(tokens) if tokens else gguf.required("vocab_size")
    return size
