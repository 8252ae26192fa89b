"""Request fields that octavo or a route does not support: rejected by name, never silently ignored."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from octavo.protocol.errors import InvalidRequestError

IsInert: TypeAlias = Callable[[Any, Mapping[str, Any]], bool]
"""Returns True if this value has no effect in this request."""

HARMLESS_FIELDS = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store"}
)
"""Known fields that are ignored: they concern OpenAI's accounting, or only matter together with an unsupported
field."""


def _is_empty(value: Any, request: Mapping[str, Any]) -> bool:
    return not value


def _is_one_of(*values: Any) -> IsInert:
    return lambda value, request: not value or value in values


def _is_at_most_n(value: Any, request: Mapping[str, Any]) -> bool:
    return not value or value == (request.get("n") or 1)


UNSUPPORTED_FIELDS: dict[str, IsInert] = {
    "tools": _is_empty,
    "tool_choice": _is_one_of("none"),
    "functions": _is_empty,
    "function_call": _is_one_of("none"),
    "reasoning_effort": _is_one_of("none"),
    "thinking_token_budget": lambda value, request: value in (None, -1),
    "best_of": _is_at_most_n,
    "suffix": _is_empty,
    "prompt_embeds": _is_empty,
    "logits_processors": _is_empty,
    "modalities": lambda value, request: not value or value == ["text"],
    "audio": _is_empty,
    "prediction": _is_empty,
    "web_search_options": _is_empty,
    "mm_processor_kwargs": _is_empty,
    "media_io_kwargs": _is_empty,
    "return_prompt_text": _is_empty,
    "return_token_offsets": _is_empty,
    "prompt_logprob_token_ids": _is_empty,
    "prompt_logprob_start": _is_empty,
}
"""Unsupported fields, each with a check for the values that are accepted because they have no effect."""


_REMEDIES = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prompt_logprob_token_ids": "send it in sampling_params to /inference/v1/generate",
}
"""What to use instead of an unsupported field."""


def reject_unsupported_fields(request: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Reject a request that uses a field that octavo or this route does not support.

    Args:
        request: the request body.
        known: additional fields that the route supports.

    Raises:
        InvalidRequestError: a field is not supported; `param` names the first one.
    """
    for name, value in request.items():
        if name not in known and (is_inert := UNSUPPORTED_FIELDS.get(name)) and not is_inert(value, request):
            remedy = _REMEDIES.get(name, "leave it out")
            raise InvalidRequestError(f"{name} is not supported here: {remedy}", name)
