"""Converts GGUF metadata to `tokenizer.json` and `tokenizer_config.json`.

Two kinds of vocabulary are supported: "gpt2", byte-level BPE with merges, and "llama", SentencePiece BPE with scores.
Sources: docs/gguf.md of the ggml project; Sennrich et al. 2016 and Kudo 2018 for the models.
"""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from octavo.frontend.model_files.gguf.pre_tokenizers import normalizer, pre_tokenization, pre_tokenizer
from octavo.protocol.errors import ConfigError

_SPACE = "\u2581"
"""SentencePiece's visible space."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's files by name: `tokenizer.json` as text, `tokenizer_config.json` as an object.

    Args:
        metadata: the file's key-value pairs.

    Raises:
        ConfigError: an unsupported vocabulary or pre-tokenizer, or a missing key.
    """
    kind = metadata.get("tokenizer.ggml.model")
    match kind:
        case "gpt2":
            tokenizer = _byte_level(metadata)
        case "llama":
            tokenizer = _sentencepiece(metadata)
        case _:
            raise ConfigError(
                f"GGUF tokenizer model {kind!r} is not supported: only gpt2 and llama are",
                hint="pass a directory with the model's tokenizer.json as --tokenizer",
            )
    _add_special_tokens(tokenizer, metadata)
    settings = _settings(metadata)
    _wrap_text(tokenizer, settings)
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": settings}


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a byte-level BPE tokenizer, as introduced by GPT-2."""
    kind = pre_tokenization(metadata.get("tokenizer.ggml.pre", "default"))
    vocab = {token: token_id for token_id, token in enumerate(_tokens(metadata))}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise ConfigError("the GGUF file's tokenizer.ggml.merges are missing or malformed")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignores_merges))
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    tokenizer.pre_tokenizer = pre_tokenizer(kind, adds_space=adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    if (normal_form := normalizer(kind)) is not None:
        tokenizer.normalizer = normal_form
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer: merges by highest score; unknown characters become bytes."""
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise ConfigError("a GGUF tokenizer that removes white space is not supported")
    tokens = _tokens(metadata)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(metadata, vocab),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in _token_types(metadata),
        )
    )
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if adds_space else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def _merges_from_scores(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that build each piece from two others, highest score first."""
    scores, types = metadata.get("tokenizer.ggml.scores"), _token_types(metadata)
    if not scores or len(scores) != len(types):
        raise ConfigError("the GGUF file's tokenizer.ggml.scores are missing or incomplete")

    def halves() -> Iterator[tuple[float, int, str, str]]:
        for piece, token_id in vocab.items():
            if types[token_id] != TokenType.NORMAL:
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocab and right in vocab:
                    yield -scores[token_id], token_id, left, right

    return [(left, right) for _, _, left, right in sorted(halves())]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Register control and user-defined tokens, which match as a whole before pre-tokenization."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    tokens, types = _tokens(metadata), _token_types(metadata)
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type in special)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (*special, TokenType.USER_DEFINED)
        ]
    )


def _settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json`."""
    tokens = _tokens(metadata)
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    adds_bos = is_sentencepiece or pre_tokenization(metadata.get("tokenizer.ggml.pre", "default")).adds_bos
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            settings[f"{ours}_token"] = tokens[token_id]
    templates = {"default": metadata.get("tokenizer.chat_template")}
    templates |= {name: metadata.get(f"tokenizer.chat_template.{name}") for name in _template_names(metadata)}
    named = [{"name": name, "template": template} for name, template in templates.items() if template]
    if named:
        settings["chat_template"] = named if len(named) > 1 else named[0]["template"]
    return settings


def _template_names(metadata: Mapping[str, Any]) -> list[str]:
    names: list[str] = metadata.get("tokenizer.chat_templates", [])
    return names


def _wrap_text(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Make `encode` add BOS and EOS as the file specifies."""
    start = [settings["bos_token"]] if settings["add_bos_token"] and "bos_token" in settings else []
    end = [settings["eos_token"]] if settings["add_eos_token"] and "eos_token" in settings else []
    if not start and not end:
        return
    single = [*start, "$A", *end]
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(start + end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *(part.replace("$A", "$B") for part in single)], special_tokens=ids
    )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _token_types(metadata: Mapping[str, Any]) -> list[int]:
    types: list[int] | None = metadata.get("tokenizer.ggml.token_type")
    return types or [TokenType.NORMAL] * len(_tokens(metadata))
