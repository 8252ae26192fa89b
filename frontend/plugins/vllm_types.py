"""Messages and requests that vLLM parsers import, with the names and fields of vLLM that they use."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.frontend.tools.call_id import new_call_id


class OpenAIBaseModel(BaseModel):
    """Base class of all types; unknown fields are kept."""

    model_config = ConfigDict(extra="allow")


class FunctionCall(OpenAIBaseModel):
    """The function and arguments of a complete call."""

    name: str
    arguments: str
    id: str | None = None


class ToolCall(OpenAIBaseModel):
    """A complete call."""

    id: str = Field(default_factory=new_call_id)
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaFunctionCall(BaseModel):
    """The new part of a call's function."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(OpenAIBaseModel):
    """The new part of a call."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(OpenAIBaseModel):
    """The new part of a response. Older parsers call the reasoning `reasoning_content`."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(BaseModel):
    """The calls of a complete response, and the text besides them."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class FunctionDefinition(OpenAIBaseModel):
    """A function as the caller describes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(OpenAIBaseModel):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(OpenAIBaseModel):
    """The name of a function."""

    name: str


class ChatCompletionNamedToolChoiceParam(OpenAIBaseModel):
    """The choice of one function. Never created: forced calls do not reach a plugin."""

    type: Literal["function"] = "function"
    function: ChatCompletionNamedFunction


class ChatCompletionRequest(OpenAIBaseModel):
    """A request, from any of the APIs."""

    messages: list[Any] = Field(default_factory=list)
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = "none"
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: Any = None
    response_format: Any = None
    stream: bool | None = False


class ResponsesRequest(ChatCompletionRequest):
    """Never created: parsers get a `ChatCompletionRequest` for every API."""
