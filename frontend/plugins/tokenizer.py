"""`PluginTokenizer`: a model's tokenizer with those methods of Hugging Face tokenizers that parsers call."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

from octavo.frontend.text.tokenizer import Tokenizer


class PluginTokenizer:
    """Converts between texts, tokens and ids. It is read-only and renders no templates.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token, self.eos_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        self.bos_token, self.bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
        self.chat_template = tokenizer.chat_template

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token ids by token string."""
        return {self._tokenizer.token_name(token_id): token_id for token_id in range(self._tokenizer.vocab_size)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self._tokenizer.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens."""
        return sorted(self._tokenizer.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Strings of the special tokens."""
        return [self._tokenizer.token_name(token_id) for token_id in self.all_special_ids]

    def get_vocab(self) -> dict[str, int]:
        """Return token ids by token string."""
        return self.vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def tokenize(self, text: str) -> list[str]:
        """Return the token strings of a text."""
        return [self._tokenizer.token_name(token_id) for token_id in self.encode(text, add_special_tokens=False)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the ids of token strings."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def convert_ids_to_tokens(self, token_ids: int | Sequence[int]) -> str | list[str]:
        """Return the token strings of ids."""
        if isinstance(token_ids, int):
            return self._tokenizer.token_name(token_ids)
        return [self._tokenizer.token_name(token_id) for token_id in token_ids]


@lru_cache(maxsize=4)
def plugin_tokenizer(tokenizer: Tokenizer) -> PluginTokenizer:
    """Return one cached object per tokenizer, because building the table of all tokens is slow."""
    return PluginTokenizer(tokenizer)
