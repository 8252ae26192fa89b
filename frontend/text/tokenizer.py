"""Text to token ids and back, on the `tokenizers` library alone.

Owns one model's tokenizer. It reads no files (`tokenizer_files.py` does), renders no templates and knows no requests.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from octavo.frontend.text.token_bytes import TokenBytes, WholeTexts
from octavo.frontend.text.tokenizer_files import read_tokenizer
from octavo.protocol.config.engine import TokenizerMode
from octavo.protocol.errors import InvalidRequestError


class Tokenizer:
    """One model's tokenizer. Thread-safe: only caches change after loading.

    Args:
        fast: the tokenizer of the library.
        special_tokens: text of the named special tokens: `{"bos_token": "<s>", ...}`.
        chat_templates: Jinja sources by name; "default" is the one used when no name is given.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        # A model's file may enable padding or truncation, which are for training batches.
        fast.no_padding()
        fast.no_truncation()
        self._fast = fast
        self._bytes = TokenBytes(fast)
        self.whole_texts = WholeTexts(self._bytes)
        """Text of each token id inside a text; None if the token is not a sequence of whole characters."""
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        added = fast.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        """Number of tokens; the model's own vocabulary may be padded beyond it."""
        self.is_absent = not self.vocab_size
        """True for the result of `absent`: no token has a text."""

    @classmethod
    def absent(cls) -> "Tokenizer":
        """Return a placeholder for an engine without a tokenizer: every token's text is empty."""
        return cls(FastTokenizer(models.BPE(vocab={}, merges=[])))

    @classmethod
    def load(cls, path: str | Path, mode: TokenizerMode = "auto") -> "Tokenizer":
        """Load from a directory; what each mode reads is in `tokenizer_files.py`.

        Raises:
            ConfigError: there is no tokenizer of that kind, or it cannot be read.
        """
        return cls(*read_tokenizer(Path(path), mode))

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
            field: the field of the request that needs it.

        Raises:
            InvalidRequestError: naming the field.
        """
        if self.is_absent:
            raise InvalidRequestError(
                f"{field} needs a tokenizer, but this engine was started without one (--skip-tokenizer-init): send "
                "prompts as token ids",
                field,
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; names of special tokens in it become those tokens.

        Args:
            text: any string.
            add_special_tokens: put the model's own tokens (such as BOS) around the text.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts, computed in parallel."""
        inputs = [_encodable(text) for text in texts]
        # perf: this is the one call of the library that lets other threads run; `encode` on a text of
        # 500 kB stops them for 0.4 s.
        encodings = self._fast.encode_batch_fast(inputs, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of tokens that are a whole text. Bytes that are not valid UTF-8 become U+FFFD.

        Args:
            token_ids: ids outside the vocabulary have no text.
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: accepted for compatibility; no tokenizer of the `tokenizers`
                library puts spaces there.
        """
        del spaces_between_special_tokens
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        parts: list[bytes] = []
        for token_id in token_ids:
            if token_id not in hidden and (data := self.token_bytes(token_id)):
                parts.append(data if parts else self.token_bytes(token_id, is_first=True))
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """Return the bytes a token adds to a text; b"" for an id outside the vocabulary.

        Args:
            token_id: any id.
            is_first: the token starts the text, where some tokenizers put a space that is not shown.
        """
        return self._bytes.first(token_id) if is_first else self._bytes[token_id]

    def token_string(self, token_id: int) -> str:
        """Return the text a token adds inside a text; part of a character shows as U+FFFD."""
        return self._bytes[token_id].decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary (not its text)."""
        found: int | None = self._fast.token_to_id(token)
        return found


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON may carry but UTF-8 cannot, by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
