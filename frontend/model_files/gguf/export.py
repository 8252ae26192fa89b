"""Makes the keys of a GGUF file from a Hugging Face checkpoint: the reverse of `config.py` and `tokenizer.py`.

Source: docs/gguf.md of the ggml project, and the converter of llama.cpp. Writes nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from octavo.frontend.evaluation.quality import fixed_text
from octavo.frontend.model_files.gguf.pre_tokenizers import KINDS
from octavo.frontend.model_files.gguf.tokenizer import TokenType, tokenizer_files
from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.errors import ConfigError

Metadata = dict[str, Any]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""llama.cpp's name of each architecture."""
_KINDS_OF_ROPE = ("default", "linear", "yarn", "llama3")


def gguf_metadata(home: Path) -> Metadata:
    """Return all keys of the GGUF file of a model.

    Args:
        home: directory of the model.

    Raises:
        ConfigError: the architecture, the rotary scaling or the tokenizer cannot be expressed in a GGUF file.
    """
    config = read_json(home / "config.json")
    names = config.get("architectures") or ["an unknown architecture"]
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"--format gguf does not know {names[0]}", hint=f"it knows {known}; or use another format")
    arch = ARCHITECTURES[names[0]]
    metadata = {"general.architecture": arch, "general.name": home.name}
    metadata |= {f"{arch}.{key}": value for key, value in _sizes(config) if value is not None}
    return metadata | _tokenizer(home, config)


def _sizes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    yield "block_count", config["num_hidden_layers"]
    yield "context_length", config["max_position_embeddings"]
    yield "embedding_length", config["hidden_size"]
    yield "feed_forward_length", config["intermediate_size"]
    yield "attention.head_count", num_heads
    yield "attention.head_count_kv", config.get("num_key_value_heads") or num_heads
    yield "attention.key_length", head_dim
    yield "attention.value_length", head_dim
    yield "attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])
    yield "rope.dimension_count", head_dim
    yield "vocab_size", config["vocab_size"]
    if config.get("use_sliding_window", True):
        yield "attention.sliding_window", config.get("sliding_window")
    yield from _rope(config)


def _rope(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    yield "rope.freq_base", float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _KINDS_OF_ROPE:
        raise ConfigError(f"--format gguf does not know rotary scaling of type {kind!r}", hint="use another format")
    if kind in ("default", "llama3"):  # llama3's factors are a tensor
        return
    yield "rope.scaling.type", kind
    yield "rope.scaling.factor", float(rope["factor"])
    if kind == "yarn":
        yield "rope.scaling.original_context_length", rope.get("original_max_position_embeddings")


def _tokenizer(home: Path, config: dict[str, Any]) -> Metadata:
    """Return keys of the tokenizer from which our own reader builds a tokenizer that gives the same tokens.

    Raises:
        ConfigError: there are no such keys.
    """
    path = home / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"--format gguf needs {path}", hint="save the tokenizer with transformers, or use another format"
        )
    original = Tokenizer.from_file(str(path))
    state = json.loads(original.to_str())
    settings = read_json(home / "tokenizer_config.json") if (home / "tokenizer_config.json").is_file() else {}
    shared = _tokens(state, config["vocab_size"]) | dict(_special_ids(home, original, settings))
    wanted = original.encode(fixed_text(), add_special_tokens=False).ids
    for candidate in _candidates(state):
        metadata = shared | candidate
        rebuilt = Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])
        if rebuilt.encode(fixed_text(), add_special_tokens=False).ids == wanted:
            return metadata
    raise ConfigError(
        f"--format gguf: no kind of tokenizer of llama.cpp gives the tokens of {path}", hint="use another format"
    )


def _tokens(state: dict[str, Any], vocab_size: int) -> Metadata:
    """Return the vocabulary, padded to the rows of the embedding, and the type of each token."""
    if state["model"]["type"] != "BPE":
        raise ConfigError(f"--format gguf does not know tokenizers of type {state['model']['type']}", hint="only BPE")
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = {number: token for token, number in state["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    has_bytes = state["model"].get("byte_fallback", False)

    def kind(number: int) -> TokenType:
        if number in added:
            return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        if number not in tokens:
            return TokenType.UNUSED
        is_byte = has_bytes and len(tokens[number]) == 6 and tokens[number].startswith("<0x")
        return TokenType.BYTE if is_byte else TokenType.NORMAL

    numbers = range(max(vocab_size, max(tokens) + 1))
    return {
        "tokenizer.ggml.tokens": [tokens.get(number, f"[PAD{number}]") for number in numbers],
        "tokenizer.ggml.token_type": [int(kind(number)) for number in numbers],
    }


def _candidates(state: dict[str, Any]) -> Iterator[Metadata]:
    """Yield candidates for the keys that describe how text is divided and merged."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in state["model"]["merges"]]
    if state["model"].get("byte_fallback"):
        rank = {"".join(merge): number for number, merge in reversed(list(enumerate(merges)))}
        vocab = sorted(state["model"]["vocab"].items(), key=lambda item: item[1])
        scores = [-float(rank.get(token, len(merges))) for token, _ in vocab]
        for adds_space in (True, False):
            yield {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.scores": scores,
                "tokenizer.ggml.add_space_prefix": adds_space,
            }
        return
    for name in KINDS:
        yield {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        }


def _special_ids(home: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{ours}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None and (number := tokenizer.token_to_id(content)) is not None:
            yield f"tokenizer.ggml.{theirs}_token_id", number
    bos = settings.get("bos_token")
    bos_content = bos.get("content") if isinstance(bos, dict) else bos
    starts = tokenizer.encode("a").tokens[:1]
    yield "tokenizer.ggml.add_bos_token", bool(starts) and starts[0] == bos_content
    yield "tokenizer.ggml.add_eos_token", False
    template_file = home / "chat_template.jinja"
    template = template_file.read_text() if template_file.is_file() else settings.get("chat_template")
    if isinstance(template, str):
        yield "tokenizer.chat_template", template
