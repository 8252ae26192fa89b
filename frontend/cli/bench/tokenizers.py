"""Tokenizers to measure random prompts: the server's, or one from a directory."""

from typing import Any

from octavo.frontend.cli.api import Api
from octavo.frontend.cli.bench.datasets import Tokenizer
from octavo.frontend.cli.errors import CommandError


class ServerTokenizer:
    """The tokenizer behind a server's `/tokenize` and `/detokenize`, as in octavo and vLLM."""

    def __init__(self, api: Api, model: str) -> None:
        self._api = api
        self._model = model

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            CommandError: the server has no such route.
        """
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return list(self._ask("/tokenize", body)["tokens"])

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids.

        Raises:
            CommandError: the server has no such route.
        """
        return str(self._ask("/detokenize", {"model": self._model, "tokens": token_ids})["prompt"])

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._api.post(path, body)
        except CommandError as error:
            raise CommandError(error.message, "name the model's tokenizer with --tokenizer DIR") from None


class LocalTokenizer:
    """A tokenizer loaded from a directory, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(token_ids)
        return text


def tokenizer_for(directory: str | None, api: Api, model: str) -> Tokenizer:
    """Return the tokenizer in a directory; the server's if no directory is given.

    Raises:
        ConfigError: the directory has no tokenizer.
    """
    if directory is None:
        return ServerTokenizer(api, model)
    from octavo.frontend.text.tokenizer import Tokenizer as FileTokenizer

    return LocalTokenizer(FileTokenizer.load(directory))
