"""vLLM's forms of a prompt, and what a request makes of one: tokens, cut and counted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict

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
    """Rows of numbers: a tensor of shape [tokens, hidden size]."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt

_KEYS = {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt"}


def as_dict(prompt: Any) -> dict[str, Any]:
    """Return a prompt as a dict.

    Raises:
        InvalidRequestError: it has a member that octavo does not know, such as images.
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


def with_text(prompt: Any, text: str | None) -> Any:
    """Return a prompt of token ids with the text that outputs show; prompts of other forms have theirs."""
    if text is None or isinstance(prompt, str | dict):
        return prompt
    return {"prompt_token_ids": list(prompt), "prompt": text}


async def tokenized(client: "AsyncClient", prompt: Any, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return a prompt with its token ids, in a form for `AsyncClient.generate`.

    Args:
        client: of the engine.
        prompt: in any of vLLM's forms.
        options: vLLM's `tokenization_kwargs`: `add_special_tokens`, `truncate_prompt_tokens` or `max_length` with
            `truncation`, `truncation_side`.

    Raises:
        InvalidRequestError: the prompt or an option is not supported.
    """
    given, cut = as_dict(prompt), _Cut(dict(options or {}), client.facts.max_model_len)
    if "prompt_embeds" in given:
        return given
    token_ids: Sequence[int] | None = given.get("prompt_token_ids")
    if token_ids is None:
        text = given.get("prompt")
        if not isinstance(text, str):
            raise InvalidRequestError('a prompt needs "prompt" (text), "prompt_token_ids" or "prompt_embeds"', "prompt")
        if cut.num_tokens is None:
            token_ids = await client.tokenize(text, add_special_tokens=cut.adds_special_tokens)
        else:  # it may be longer than the context
            token_ids = await client.run_in_thread(
                lambda: client.tokenizer.encode(text, add_special_tokens=cut.adds_special_tokens)
            )
    return {**given, "prompt_token_ids": cut.apply(token_ids)}


class _Cut:
    """vLLM's `tokenization_kwargs`."""

    def __init__(self, options: dict[str, Any], max_model_len: int) -> None:
        self.adds_special_tokens: bool = options.pop("add_special_tokens", True)
        self._keeps_start = options.pop("truncation_side", "right") == "right"
        limit = options.pop("truncate_prompt_tokens", None)
        max_length = options.pop("max_length", None)
        if options.pop("truncation", False) and limit is None:
            limit = -1 if max_length is None else max_length
        if options:
            raise InvalidRequestError(
                f"tokenization_kwargs: {', '.join(sorted(options))} is not supported: use add_special_tokens, "
                "truncation, max_length, truncation_side or truncate_prompt_tokens",
                "tokenization_kwargs",
            )
        self.num_tokens = max_model_len - 1 if limit == -1 else limit

    def apply(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that are kept."""
        if self.num_tokens is None or len(token_ids) <= self.num_tokens:
            return list(token_ids)
        return list(token_ids[: self.num_tokens] if self._keeps_start else token_ids[-self.num_tokens :])
