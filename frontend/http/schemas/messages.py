"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, requests and unary responses.

Source: the API's published reference, and the types of its Python client. Content blocks stay dicts, like the messages
of chat completions: `messages_request.py` checks them and names the invalid part.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from octavo.frontend.http.schemas.sampling import Priority, Seed


class MessageTool(Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    """JSON schema of the arguments; None: the function takes none."""
    type: str | None = None
    """"custom", or the name of a tool that runs on Anthropic's servers. octavo rejects the latter."""
    strict: bool | None = None


class MessageToolChoice(Struct, kw_only=True):
    """Which tool must or may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Only for the type "tool"."""
    disable_parallel_tool_use: bool = False


class Thinking(Struct, kw_only=True):
    """Whether the model reasons first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Length limit of the reasoning in tokens."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the response has no reasoning. There are no summaries: the full reasoning is shown."""


class OutputFormat(Struct, kw_only=True):
    """The required format of the response."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """Settings of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Becomes the chat template's `reasoning_effort`, where max is xhigh."""
    format: OutputFormat | None = None


class MessagePrompt(Struct, kw_only=True):
    """The fields that determine the prompt."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(MessagePrompt, kw_only=True):
    """A conversation to answer."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    """Ignored."""
    seed: Seed | None = None
    """As in chat completions; not part of Anthropic's API."""
    priority: Priority = 0
    """As in chat completions; not part of Anthropic's API."""


class CountTokensRequest(MessagePrompt, kw_only=True):
    """A conversation whose tokens to count."""


class TokenCount(Struct, kw_only=True):
    """Number of tokens of a prompt."""

    input_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Token usage of one response."""

    input_tokens: int
    """Prompt tokens that were not in the prefix cache."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class MessageAnswer(Struct, kw_only=True):
    """The complete response."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    """Blocks of the types thinking, text and tool_use."""
    stop_reason: str | None
    """end_turn, max_tokens, stop_sequence or tool_use; null at the start of a stream."""
    stop_sequence: str | None = None
    usage: MessageUsage
