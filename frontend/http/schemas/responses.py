"""`/v1/responses`: OpenAI's Responses API, requests and responses.

Source: the API's published reference, and the types of its Python client. Items stay dicts, like the messages of chat
completions: `responses_request.py` checks them and names the invalid part.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from octavo.frontend.http.schemas.sampling import Priority, Seed


class TextOptions(Struct, kw_only=True):
    """The required format of the text."""

    format: dict[str, Any] | None = None
    """`text`, `json_object`, or `json_schema` with `name`, `schema` and `strict`."""
    verbosity: str | None = None
    """Ignored."""


class ReasoningOptions(Struct, kw_only=True):
    """How much the model reasons, and where the response shows the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Shows the full reasoning as its summary: octavo makes no shorter one."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Former name of `summary`."""


class ResponsesRequest(Struct, kw_only=True):
    """A conversation to answer."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    """Used as the first message; not stored for later responses."""
    previous_response_id: str | None = None
    """Id of a stored response whose conversation continues."""
    store: bool | None = None
    """Default: true; false in a batch."""
    background: bool | None = None
    """Generate without a connection; needs `store`."""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    """Ignored: events are never padded (`include_obfuscation`)."""
    conversation: str | dict[str, Any] | None = None
    """Rejected: there are no conversation objects, only `previous_response_id`."""
    prompt: dict[str, Any] | None = None
    """Rejected: there are no prompt templates."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Limit on calls of built-in tools, of which octavo has none. Function calls do not count."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: drop the oldest tokens of a prompt that is too long."""
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    """Ignored: prefixes are always cached."""
    safety_identifier: str | None = None
    """Ignored."""
    service_tier: str | None = None
    """Ignored."""
    top_k: int | None = None
    """As in chat completions, like the fields below; not part of OpenAI's API."""
    seed: Seed | None = None
    priority: Priority = 0
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputTokensDetails(Struct):
    """Details of the prompt tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Always 0: nothing is billed for the prefix cache."""


class OutputTokensDetails(Struct):
    """Details of the generated tokens."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """Token usage of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """A response, including the request's settings."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    """Unix time of completion; null in all other states."""
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, Any] = {}
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Struct, kw_only=True):
    """A response was deleted from the store."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True


class InputItems(Struct, kw_only=True):
    """The input items of a stored response."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
