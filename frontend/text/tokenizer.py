"""Text to token ids and back, on the `tokenizers` library alone.

Owns one model's tokenizer and what its files say about special tokens and chat templates. It renders
no templates and knows no requests.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FastTokenizer

from octavo.frontend.model_files.json_file import read_json
from octavo.frontend.text.token_bytes import TokenBytes
from octavo.protocol.errors import ConfigError, InvalidRequestError

_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Thread-safe: nothing changes after loading but caches.

    Args:
        fast: the tokenizer proper.
        special_tokens: text of the named special tokens: `{"bos_token": "<s>", ...}`.
        chat_templates: Jinja sources by name; "default" is the one used when no name is given.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        # A model's file may ask for padding or cutting, which are for training batches.
        fast.no_padding()
        fast.no_truncation()
        self._fast = fast
        self._bytes = TokenBytes(fast)
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        added = fast.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        """Number of tokens; the model's own vocabulary may be padded beyond it."""
        self.is_absent = not self.vocab_size
        """True for that of `absent`: no token has a text."""

    @classmethod
    def absent(cls) -> "Tokenizer":
        """Return what stands for the tokenizer of an engine that has none: every token's text is empty."""
        return cls(FastTokenizer(models.BPE(vocab={}, merges=[])))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load from a directory in Hugging Face layout.

        `tokenizer.json` is read directly; a directory with older files only is converted by `transformers`,
        whose import takes seconds.

        Raises:
            ConfigError: there is no tokenizer, or it cannot be read.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if file.is_file():
            try:
                fast = FastTokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare Exception for every malformed file
                raise _unreadable(file, error) from error
        else:
            fast = _convert_slow(path)
        special_tokens, chat_templates = _read_settings(path)
        _make_special(fast, special_tokens.values())
        return cls(fast, special_tokens, chat_templates)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters that a single token stands for at most."""
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
        """Id of `eos_token`; what ends a generation is for `ModelFacts.eos_token_ids` to say."""
        return None if self.eos_token is None else self.token_id(self.eos_token)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template."""
        return self.chat_templates.get("default")

    def require(self, field: str) -> None:
        """Refuse what cannot be done without a tokenizer, if there is none.

        Args:
            field: of the request, that asks for it.

        Raises:
            InvalidRequestError: naming the field.
        """
        if self.is_absent:
            raise InvalidRequestError(
                f"{field} needs a tokenizer, and this engine was started without one (--skip-tokenizer-init): it takes "
                "token ids as prompts and returns token ids",
                field,
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; special tokens written out in it become themselves.

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
        """Return the text of tokens that are a whole text. Bytes that are no UTF-8 become U+FFFD.

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


def _convert_slow(path: Path) -> FastTokenizer:
    if not any((path / name).is_file() for name in _SLOW_FILES):
        raise ConfigError(
            f"no tokenizer in {path}: neither tokenizer.json nor {', '.join(_SLOW_FILES)}",
            phase="loading the tokenizer",
            hint="name the directory that holds it with --tokenizer",
        )
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _unreadable(path, error) from error
    fast = getattr(slow, "backend_tokenizer", None)
    if not isinstance(fast, FastTokenizer):
        raise ConfigError(
            f"the tokenizer in {path} ({type(slow).__name__}) cannot be converted to the tokenizers library",
            phase="loading the tokenizer",
            hint="name a directory that holds a tokenizer.json with --tokenizer",
        )
    return fast


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"cannot read the tokenizer {path}: {reason}", phase="loading the tokenizer")


def _make_special(fast: FastTokenizer, texts: Iterable[str]) -> None:
    """Declare tokens special that tokenizer_config.json names and tokenizer.json has as ordinary ones."""
    added = {token.content for token in fast.get_added_tokens_decoder().values()}
    ordinary = [text for text in texts if text not in added and fast.token_to_id(text) is not None]
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(ordinary)])


def _read_settings(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the named special tokens and the chat templates that the files beside the tokenizer hold."""
    settings = read_json(path / "special_tokens_map.json") | read_json(path / "tokenizer_config.json")
    special_tokens = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special_tokens[name] = text
    return special_tokens, _chat_templates(path, settings)


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return templates by name: files of their own win over entries of tokenizer_config.json."""
    templates: dict[str, str] = {}
    in_config = settings.get("chat_template")
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        templates |= {entry["name"]: entry["template"] for entry in in_config if {"name", "template"} <= entry.keys()}
    in_json = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
