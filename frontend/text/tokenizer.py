"""Converts text to token ids and back, with nothing but the `tokenizers` library.

Owns one model's tokenizer. Reads no files (`tokenizer_files.py` does), renders no templates, and is independent of
requests.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FastTokenizer

from octavo.frontend.text.token_bytes import TokenBytes, WholeTexts
from octavo.frontend.text.tokenizer_files import read_tokenizer
from octavo.protocol.config.model import TokenizerMode
from octavo.protocol.errors import InvalidRequestError


class Tokenizer:
    """One model's tokenizer. Thread-safe: only caches change after loading.

    Args:
        fast: the tokenizer object of the library.
        special_tokens: texts of the named special tokens: `{"bos_token": "<s>", ...}`.
        chat_templates: Jinja texts by name; "default" is used if no name is given.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        # A model's file may enable padding or truncation, which are meant for training batches.
        fast.no_padding()
        fast.no_truncation()
        self._fast = fast
        self._bytes = TokenBytes(fast)
        self.whole_texts = WholeTexts(self._bytes)
        """Text of each token id inside a text; `None` if the token is not a sequence of complete characters."""
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        self._marked: dict[str, Tokenizer] = {}
        added = fast.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that `skip_special_tokens` omits."""
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        """Number of tokens; the model's own vocabulary may be padded to more."""
        self.is_absent = not self.vocab_size
        """Whether this is the result of `absent`, whose tokens have no text."""

    @classmethod
    def absent(cls) -> "Tokenizer":
        """Return a placeholder for an engine without a tokenizer: every token's text is empty."""
        return cls(FastTokenizer(models.BPE(vocab={}, merges=[])))

    @classmethod
    def load(cls, path: str | Path, mode: TokenizerMode = "auto") -> "Tokenizer":
        """Load a tokenizer from a directory. `tokenizer_files.py` describes what each mode reads.

        Raises:
            ConfigError: there is no tokenizer of that kind, or it cannot be read.
        """
        return cls(*read_tokenizer(Path(path), mode))

    @property
    def fast(self) -> FastTokenizer:
        """The tokenizer of the `tokenizers` library. Must not be changed."""
        return self._fast

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token, in characters."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)))

    @property
    def bos_token(self) -> str | None:
        """Text of the token that starts a sequence."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of `bos_token`."""
        return None if self.bos_token is None else self.token_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`; `ModelFacts.eos_token_ids` decides which tokens end a generation."""
        return None if self.eos_token is None else self.token_id(self.eos_token)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template."""
        return self.chat_templates.get("default")

    def require(self, field: str) -> None:
        """Raise an error if there is no tokenizer.

        Args:
            field: the field of the request that needs a tokenizer.

        Raises:
            InvalidRequestError: there is no tokenizer; the error names the field.
        """
        if self.is_absent:
            raise InvalidRequestError(
                f"{field} needs a tokenizer, but this engine was started without one (--skip-tokenizer-init): send "
                "prompts as token ids",
                field,
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Names of special tokens in the text become those tokens.

        Args:
            text: any string.
            add_special_tokens: whether to add the model's special tokens (such as BOS).
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts, computed in parallel."""
        inputs = [_encodable(text) for text in texts]
        # perf: this is the library's only function that releases the GIL. `encode` on a text of 500 kB blocks other
        # threads for 0.4 s.
        encodings = self._fast.encode_batch_fast(inputs, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_inputs(
        self,
        inputs: Sequence[str | tuple[str, str]],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        keeps_start: bool = True,
        max_part_tokens: tuple[int, int] = (0, 0),
    ) -> list["EncodedInput"]:
        """Return the token ids of texts, and of pairs of texts in the model's own pair format.

        Args:
            inputs: texts and pairs of texts.
            add_special_tokens: as in `encode`.
            max_tokens: longer inputs are truncated, but keep the tokens that the model adds. The longer text of a pair
            is truncated first. None: no truncation.
            keeps_start: whether to cut off the end of a text instead of its start.
            max_part_tokens: limits of each text of a pair; 0: no limit.

        Raises:
            InvalidRequestError: `max_tokens` leaves no room for any token of the text.
        """
        whole = [
            _encodable(one) if isinstance(one, str) else (_encodable(one[0]), _encodable(one[1])) for one in inputs
        ]
        encodings: list[Any] = [None] * len(whole)
        if not any(max_part_tokens):
            encodings = self._fast.encode_batch_fast(whole, add_special_tokens=add_special_tokens)
            if max_tokens is None:
                return [EncodedInput.of(encoding) for encoding in encodings]
        return [
            EncodedInput.of(encoding)
            if encoding is not None and len(encoding.ids) <= (max_tokens or 0)
            else self._cut(one, add_special_tokens, max_tokens, keeps_start, max_part_tokens)
            for one, encoding in zip(whole, encodings, strict=True)
        ]

    def _cut(
        self,
        one: str | tuple[str, str],
        add_special_tokens: bool,
        max_tokens: int | None,
        keeps_start: bool,
        max_part_tokens: tuple[int, int],
    ) -> "EncodedInput":
        texts = (one,) if isinstance(one, str) else one
        parts = [self._fast.encode(text, add_special_tokens=False) for text in texts]
        lengths = [
            min(len(part.ids), limit) if limit else len(part.ids)
            for part, limit in zip(parts, max_part_tokens if len(parts) == 2 else (0,), strict=True)
        ]
        if max_tokens is not None:
            room = max_tokens - (self._fast.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0)
            if room < len(parts):
                raise InvalidRequestError(
                    f"truncation to {max_tokens} tokens leaves none of the text: raise it", "truncate_prompt_tokens"
                )
            lengths = _longest_first(lengths, room)
        for part, length in zip(parts, lengths, strict=True):
            part.truncate(length, direction="right" if keeps_start else "left")
        pair = parts[1] if len(parts) == 2 else None
        return EncodedInput.of(self._fast.post_process(parts[0], pair, add_special_tokens))

    def shortened(self, text: str, max_tokens: int) -> str:
        """Return the beginning of a text that has at most `max_tokens` tokens; 0: the complete text."""
        token_ids = self.encode(text, add_special_tokens=False) if max_tokens else []
        return self.decode(token_ids[:max_tokens]) if len(token_ids) > max_tokens else text

    def marked(self, mark: str) -> "Tokenizer":
        """Return a tokenizer that has one more special token. Created once per mark, which takes up to a second."""
        found = self._marked.get(mark)
        if found is None:
            fast = FastTokenizer.from_str(self._fast.to_str())
            fast.add_special_tokens([AddedToken(mark, special=True)])
            found = self._marked[mark] = Tokenizer(fast, self.special_tokens)
        return found

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of tokens that form a complete text. Bytes that are not valid UTF-8 become U+FFFD.

        Args:
            token_ids: the token ids; ids outside the vocabulary have no text.
            skip_special_tokens: whether to omit special tokens.
            spaces_between_special_tokens: accepted for compatibility; no tokenizer of the `tokenizers` library puts
            spaces there.
        """
        del spaces_between_special_tokens
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        parts: list[bytes] = []
        for token_id in token_ids:
            if token_id not in hidden and (data := self.token_bytes(token_id)):
                parts.append(data if parts else self.token_bytes(token_id, is_first=True))
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; b"" for an id outside the vocabulary.

        Args:
            token_id: any id.
            is_first: whether the token starts the text, where some tokenizers add a space that is not shown.
        """
        return self._bytes.first(token_id) if is_first else self._bytes[token_id]

    def token_string(self, token_id: int) -> str:
        """Return the text that a token adds inside a text. Part of a character is shown as U+FFFD."""
        return self._bytes[token_id].decode("utf-8", errors="replace")

    def token_name(self, token_id: int) -> str:
        """Return the name of a token in the vocabulary, which is not its text: `Ġthe` or `▁the` for ` the`."""
        return self._fast.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, which is not its text."""
        found: int | None = self._fast.token_to_id(token)
        return found


class EncodedInput(NamedTuple):
    """The tokens of a text, or of a pair of texts."""

    ids: list[int]
    segment_start: int
    """Index of the first token of the second type (BERT's token types); 0 if there are none."""

    @classmethod
    def of(cls, encoding: Any) -> "EncodedInput":
        """Return the required parts of the library's result."""
        ids = encoding.ids
        if encoding.n_sequences < 2:  # perf: only pairs have a second type
            return cls(ids, 0)
        types = encoding.type_ids
        return cls(ids, types.index(1) if 1 in types else 0)


def _longest_first(lengths: list[int], room: int) -> list[int]:
    """Return how many tokens to keep of one or two texts, like `longest_first` of the tokenizers library."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    short = min(lengths)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _encodable(text: str) -> str:
    """Replace lone surrogates by U+FFFD: JSON may contain them, but UTF-8 cannot encode them."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
