"""Fill in the middle: makes the prompt from a prefix and a suffix, for models with special tokens for that.

Sources of the formats: the model cards and papers of the model families, and their published tokenizers. A family is
recognized by its tokens instead of the model's name.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from octavo.protocol.errors import InvalidRequestError

Part: TypeAlias = Literal["prefix", "suffix"]

Encode: TypeAlias = Callable[[str], Awaitable[list[int]]]
"""Tokenizes a text without special tokens."""


class Vocabulary(Protocol):
    """The part of a tokenizer that this module needs."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; `None` if there is no such token."""


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The prompt format of one family of models."""

    families: str
    prefix: str
    """The token that precedes the prefix; `suffix` and `middle` are the tokens of the other parts."""
    suffix: str
    middle: str | None
    """`None` if the prefix is the last part, and the output follows it directly."""
    ends: tuple[str, ...] = ()
    """Additional tokens that end an output, if the vocabulary has them."""
    has_suffix_first: bool = False
    joins_suffix: bool = False
    """Whether the suffix is tokenized as if inside a text, without the space that the tokenizer puts before a text."""

    @property
    def tokens(self) -> list[str]:
        """The tokens that the vocabulary must contain."""
        return [token for token in (self.prefix, self.suffix, self.middle) if token is not None]


FORMATS = (
    InfillFormat(
        "Qwen2.5-Coder, CodeGemma",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    InfillFormat(
        "StarCoder, StarCoder2, Granite Code",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<file_sep>", "<repo_name>", "<filename>", "<|endoftext|>"),
    ),
    InfillFormat("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    InfillFormat("CodeLlama", "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",), joins_suffix=True),
    InfillFormat(
        "DeepSeek-Coder",
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),
    InfillFormat("Codestral", "[PREFIX]", "[SUFFIX]", None, has_suffix_first=True, joins_suffix=True),
)

_MARK = "\u263a"
"""A character that no tokenizer merges with letters around it."""


def infill_format(vocabulary: Vocabulary) -> InfillFormat:
    """Return the fill-in-the-middle format of a model.

    Raises:
        InvalidRequestError: the vocabulary has the tokens of no known family.
    """
    for one in FORMATS:
        if all(vocabulary.token_id(token) is not None for token in one.tokens):
            return one
    raise InvalidRequestError(
        "suffix needs a model that was trained to fill in the middle, and the tokenizer of this one has none of the "
        f"tokens for it (known: {'; '.join(one.families for one in FORMATS)}): leave it out, or serve such a model",
        "suffix",
    )


async def infill_prompt(
    form: InfillFormat, vocabulary: Vocabulary, prefix: str | Sequence[int], suffix: str, encode: Encode
) -> list[int]:
    """Return the token ids of a prompt, without a begin-of-text token.

    Args:
        form: the form of the model.
        vocabulary: a vocabulary that has the tokens of `form`.
        prefix: text before the gap, or its token ids.
        suffix: text after the gap.
        encode: the encoding function of the model's tokenizer.
    """
    own = await encode(prefix) if isinstance(prefix, str) else list(prefix)
    behind = await _encode_inside(suffix, encode) if form.joins_suffix else await encode(suffix)
    before = [_id(vocabulary, form.prefix), *own]
    after = [_id(vocabulary, form.suffix), *behind]
    tokens = after + before if form.has_suffix_first else before + after
    return tokens if form.middle is None else [*tokens, _id(vocabulary, form.middle)]


def infill_stops(form: InfillFormat, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens that end an output in addition to the model's own. None of them may occur in a text."""
    ids = [vocabulary.token_id(token) for token in (*form.tokens, *form.ends)]
    return sorted({one for one in ids if one is not None})


async def _encode_inside(text: str, encode: Encode) -> list[int]:
    """Tokenize a text that follows a mark, and remove the mark."""
    mark, tokens = await encode(_MARK), await encode(_MARK + text)
    if tokens[: len(mark)] != mark:
        raise InvalidRequestError("suffix cannot be tokenized apart from the prefix with this tokenizer", "suffix")
    return tokens[len(mark) :]


def _id(vocabulary: Vocabulary, token: str) -> int:
    found = vocabulary.token_id(token)
    assert found is not None, "the format was chosen by its tokens"
    return found
