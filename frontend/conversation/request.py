"""`ChatRequest`: a conversation to answer, independent of the API. Checks nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.generation.request import GenerationRequest
from octavo.frontend.text.messages import Message
from octavo.frontend.tools.plan import ToolChoice
from octavo.protocol.structured import StructuredOutputsParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTool:
    """A function that the model may call, as the caller describes it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments; `None` if there are none."""
    is_strict: bool = False
    """Whether calls must match the schema even if the model may choose to call or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """The input of the chat template."""

    messages: Sequence[Message]
    tools: Sequence[ChatTool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    """The caller's own template, as Jinja text; `None` for the model's."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Additional template variables (`chat_template_kwargs`)."""
    reasoning_effort: str | None = None
    """For templates that use it; "none" turns reasoning off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One conversation and how to answer it."""

    input: ChatInput
    generation: GenerationRequest
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    allows_parallel_calls: bool = True
    answer_form: StructuredOutputsParams | None = None
    """Constraint on an answer that is not a call; already verified."""
    max_reasoning_tokens: int | None = None
    """Number of tokens after which the reasoning is ended; `None` if unlimited."""
    shows_reasoning: bool = True
    echoes_last_message: bool = False
    """Whether the answer begins with the text of the assistant message that it continues."""
    prompt_token_ids: Sequence[int] | None = None
    """Token ids of the prompt, if another engine has already rendered it; `input` is then not rendered."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of the model's media processor."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens; chat templates usually write them."""
