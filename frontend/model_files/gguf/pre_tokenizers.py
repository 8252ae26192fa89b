"""Maps the names in `tokenizer.ggml.pre` to pre-tokenizers, which divide text before byte-level BPE merges.

A GGUF file has only the name. Source: the tokenizers that llama.cpp's converter recognizes under each name, and the
patterns of its `llama-vocab.cpp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.protocol.errors import ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}|" + _REST % ""
"""Patterns of tiktoken; models differ in the number of digits in a piece."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_TEKKEN = _CASED_WORDS % ("", "") + r"\p{N}|" + _REST % "/"
_O200K = _CASED_WORDS % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}|" + _REST % "/"
_BLOOM = r" ?[^(\s|[.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" + "])]+"
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = (
    r"(?i:'[sdmt]|'ll|'ve|'re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CJK, _KANA, _HANGUL = "\u4e00-\u9fa5", "\u3040-\u309f\u30a0-\u30ff", "\u0800-\u4e00\uac00-\ud7ff"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Steps = Callable[[bool], list[Any]]
"""Returns pre-tokenizers; the argument says whether a space is put before the text."""


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How text is processed before merges are applied."""

    steps: Steps
    has_nfc: bool = False
    """Whether text is normalized (NFC) first."""
    ignores_merges: bool = False
    """Whether words of the vocabulary become tokens even if merges would not build them."""
    adds_bos: bool = False
    """Whether texts begin with BOS if the file does not say."""


def _gpt2(*first: Any) -> Steps:
    """Return steps that end with the pattern of GPT-2."""
    return lambda adds_space: [*first, pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=True)]


def _patterns(*patterns: str) -> Steps:
    """Return steps that divide by several patterns in sequence."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return lambda adds_space: [*splits, pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False)]


def _falcon(adds_space: bool) -> list[Any]:
    return [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        *_gpt2()(adds_space),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]


_DIGITS = _gpt2(pre_tokenizers.Digits(individual_digits=True))
_LLAMA3 = PreTokenization(_patterns(_WORDS % 3), ignores_merges=True, adds_bos=True)
_KINDS: tuple[tuple[str, PreTokenization], ...] = (
    (
        "gpt-2 gpt2 default phi-2 jais roberta-bpe exaone4 gigachat a.x-4.0 mellum trillion granite-docling",
        PreTokenization(_gpt2()),
    ),
    ("mpt olmo", PreTokenization(_gpt2(), has_nfc=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b", PreTokenization(_DIGITS)),
    ("command-r", PreTokenization(_DIGITS, has_nfc=True)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3),
    ("dbrx smaug-bpe chatglm-bpe glm4", PreTokenization(_patterns(_WORDS % 3))),
    ("qwen2", PreTokenization(_patterns(_WORDS % 1), has_nfc=True)),
    ("deepseek-r1-qwen megrez stablelm2 kormo hunyuan grok-2", PreTokenization(_patterns(_WORDS % 1))),
    ("tekken", PreTokenization(_patterns(_TEKKEN), ignores_merges=True, adds_bos=True)),
    ("gpt-4o llama4 minimax-m2", PreTokenization(_patterns(_O200K))),
    ("falcon", PreTokenization(_falcon)),
    ("bloom poro-chat gpt3-finnish", PreTokenization(_patterns(_BLOOM))),
    ("viking", PreTokenization(_patterns(_BLOOM, r"\p{N}"))),
    ("seed-coder", PreTokenization(_patterns(_SEED))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenization(_patterns(_BAILING))),
    (
        "deepseek-coder",
        PreTokenization(
            _patterns("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_CJK}{_HANGUL}]+", r"\p{N}"),
        ),
    ),
    ("deepseek-v3 hunyuan-dense", PreTokenization(_patterns(r"\p{N}{1,3}", f"[{_CJK}{_KANA}]+", _DEEPSEEK3))),
)
KINDS: Mapping[str, PreTokenization] = {name: kind for names, kind in _KINDS for name in names.split()}
"""Pre-tokenizations by name."""


def pre_tokenization(name: str) -> PreTokenization:
    """Return the pre-tokenization with a name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in KINDS:
        raise ConfigError(
            f"GGUF pre-tokenizer {name!r} is not supported",
            hint=f"supported: {', '.join(sorted(KINDS))}; or pass a directory with the model's tokenizer.json as "
            "--tokenizer",
        )
    return KINDS[name]


def pre_tokenizer(kind: PreTokenization, *, adds_space: bool) -> Any:
    """Return the pre-tokenizer. `adds_space`: put a space before the text."""
    steps = kind.steps(adds_space)
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def normalizer(kind: PreTokenization) -> Any:
    """Return the normalizer. `None` if there is none."""
    return normalizers.NFC() if kind.has_nfc else None
