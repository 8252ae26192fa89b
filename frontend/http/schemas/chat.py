"""`/v1/chat/completions`: request, response and stream chunks."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.frontend.http.schemas.completions import PromptLogprobs
from octavo.frontend.http.schemas.sampling import SamplingFields
from octavo.frontend.http.schemas.timings import RequestMetrics
from octavo.frontend.http.schemas.usage import Usage
from octavo.frontend.outputs import WeightRange
from octavo.frontend.receipts.receipt import Receipt

MAX_CONVERSATIONS = 1024
"""Maximum number of conversations in one batch request."""


class FunctionDefinition(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None: the function takes none."""
    strict: bool | None = None
    """Whether calls must match the schema even under tool_choice "auto"; required calls always do."""


class ToolDefinition(Struct, kw_only=True):
    """Something the model may call: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedToolChoice(Struct, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class AllowedTools(Struct, kw_only=True):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Meta(min_length=1)]


class AllowedToolsChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """A subset of the tools. The prompt still describes all tools, so that its prefix stays the same."""

    allowed_tools: AllowedTools


Conversation: TypeAlias = Annotated[list[dict[str, Any]], Meta(min_length=1)]


class ChatFields(SamplingFields, kw_only=True):
    """Fields that control how conversations are answered."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Chat templates write the special tokens themselves, so the default is False."""
    chat_template: str | None = None
    """The Jinja template itself; never a file name."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Additional arguments of the model's image processor."""
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    """Default: auto if there are tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    include_reasoning: bool = True
    """False: the reasoning is omitted from the response."""
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Length limit of the reasoning in tokens; -1: no limit."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """For chat templates that use it; "none" disables reasoning."""


class ChatCompletionRequest(ChatFields, kw_only=True):
    """A conversation to answer."""

    messages: Conversation


class ChatBatchRequest(ChatFields, kw_only=True):
    """Several conversations to answer, each by one choice. Tools, streams and beam searches are not available."""

    messages: Annotated[list[Conversation], Meta(min_length=1, max_length=MAX_CONVERSATIONS)]


class TopLogprob(Struct):
    """One candidate token at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry per token."""

    content: list[TokenLogprob]


class FunctionCall(Struct):
    """The function, and its arguments as JSON text. The text is cut off if the response was."""

    name: str
    arguments: str


class MessageToolCall(Struct):
    """One call."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """The response message."""

    content: str | None
    """Null if the response has only calls or reasoning."""
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType | None = UNSET
    """The reasoning, if a reasoning parser separates it; null if there is none."""
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One choice of a response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """The complete response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    """Parameters with which another engine fetches the KV blocks that this request left."""


class FunctionCallDelta(Struct, kw_only=True):
    """New parts of a function's name and arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct, kw_only=True):
    """New parts of one call. Only the first delta has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class Delta(Struct, kw_only=True):
    """New parts of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    """New parts of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    """Only in the last chunk."""
