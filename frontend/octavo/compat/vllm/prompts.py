"""Prompts in vLLM's forms: tokenization and truncation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias, TypedDict

from octavo.frontend.media.sources import FIELD, KWARGS, UUIDS
from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient


class TextPrompt(TypedDict):
    """A text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and optionally the text that outputs show."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Prompt embeddings: a tensor of shape (tokens, hidden size)."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt

_KEYS = {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", FIELD, KWARGS, UUIDS}


def as_dict(prompt: Any) -> dict[str, Any]:
    """Return a prompt as a dict.

    Raises:
        InvalidRequestError: it has a key that octavo does not know.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, dict):
        return {"prompt_token_ids": list(prompt)}
    given = {name: value for name, value in prompt.items() if value is not None}
    if unknown := given.keys() - _KEYS:
        raise InvalidRequestError(
            f"a prompt has {', '.join(sorted(unknown))}, which octavo does not support: it knows "
            f"{', '.join(sorted(_KEYS))}",
            "prompt",
        )
    return given


def with_kwargs(client: "AsyncClient", prompts: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    """Add arguments of the media processor to prompts; a prompt's own arguments take precedence.

    Raises:
        InvalidRequestError: the model reads text only.
    """
    if not kwargs:
        return list(prompts)
    if client.media is None:
        raise InvalidRequestError(f"{KWARGS}: the model reads text only: leave it out", KWARGS)
    return [
        {**one, KWARGS: {**kwargs, **(one.get(KWARGS) or {})}}
        if isinstance(one, dict) and one.keys() & {FIELD, UUIDS}
        else one
        for one in prompts
    ]


def with_text(prompt: Any, text: str | None) -> Any:
    """Add the text that outputs show to a prompt of token ids; prompts of other forms have their own."""
    if text is None or isinstance(prompt, str | dict):
        return prompt
    return {"prompt_token_ids": list(prompt), "prompt": text}


async def tokenized(client: "AsyncClient", prompt: Any, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return a prompt with its token ids, in a form for `AsyncClient.generate`.

    Args:
        client: client of the engine.
        prompt: in any of vLLM's forms.
        options: vLLM's `tokenization_kwargs`.

    Raises:
        InvalidRequestError: the prompt or an option is not supported.
    """
    given, tokenization = as_dict(prompt), Tokenization.of(options)
    if given.keys() & {"prompt_embeds", FIELD, UUIDS}:
        return given
    token_ids: Sequence[int] | None = given.get("prompt_token_ids")
    if token_ids is None:
        text = given.get("prompt")
        if not isinstance(text, str):
            raise InvalidRequestError('a prompt needs "prompt" (text), "prompt_token_ids" or "prompt_embeds"', "prompt")
        adds_special_tokens = tokenization.adds_special_tokens
        if tokenization.max_tokens is None:
            token_ids = await client.tokenize(text, add_special_tokens=adds_special_tokens)
        else:  # it may be longer than the context
            token_ids = await client.run_in_thread(
                lambda: client.tokenizer.encode(text, add_special_tokens=adds_special_tokens)
            )
    return {**given, "prompt_token_ids": tokenization.truncated(token_ids, client)}


@dataclass(frozen=True, slots=True)
class Tokenization:
    """vLLM's `tokenization_kwargs`, parsed."""

    max_tokens: int | None
    """Longer prompts are truncated to this length. -1: to the engine's limit; `None`: no truncation."""
    side: Literal["left", "right"] | None
    """Side on which tokens are removed. `None`: the tokenizer's default."""
    adds_special_tokens: bool

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> "Tokenization":
        """Parse the options.

        Raises:
            InvalidRequestError: an option is not supported, or its value is invalid.
        """
        given = dict(options or {})
        limit, max_length = given.pop("truncate_prompt_tokens", None), given.pop("max_length", None)
        if given.pop("truncation", False) and limit is None:
            limit = -1 if max_length is None else max_length
        side, adds_special_tokens = given.pop("truncation_side", None), given.pop("add_special_tokens", True)
        if given:
            raise _invalid(
                f"{', '.join(sorted(given))} is not supported: use add_special_tokens, truncation, max_length, "
                "truncation_side or truncate_prompt_tokens"
            )
        if limit is not None and not isinstance(limit, int):
            raise _invalid(f"truncate_prompt_tokens and max_length are integers, not {limit!r}")
        if side not in ("left", "right", None):
            raise _invalid(f"truncation_side must be left or right, got {side!r}")
        return cls(limit if limit is None else max(limit, -1), side, bool(adds_special_tokens))

    def side_for(self, client: "AsyncClient") -> Literal["left", "right"]:
        """Return the side on which tokens are removed; transformers reads the default from the same file."""
        path = client.config.model.tokenizer_path
        if self.side is None and path is not None:
            settings = read_json(Path(path) / "tokenizer_config.json")
            return "left" if settings.get("truncation_side") == "left" else "right"
        return self.side or "right"

    def truncated(self, token_ids: Sequence[int], client: "AsyncClient") -> list[int]:
        """Return the tokens that remain."""
        limit = client.facts.max_model_len - 1 if self.max_tokens == -1 else self.max_tokens
        if limit is None or len(token_ids) <= limit:
            return list(token_ids)
        return list(token_ids[len(token_ids) - limit :] if self.side_for(client) == "left" else token_ids[:limit])


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"tokenization_kwargs: {message}", "tokenization_kwargs")
