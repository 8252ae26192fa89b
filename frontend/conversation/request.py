"""`ChatRequest`: a conversation to answer, whichever API it came through. Checks nothing."""

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
    """JSON schema of the arguments; None: there are none."""
    is_strict: bool = False
    """Calls must match the schema even where the model may choose to call or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """What the chat template turns into a prompt."""

    messages: Sequence[Message]
    tools: Sequence[ChatTool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    """The caller's own template, as Jinja text."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (`chat_template_kwargs`)."""
    reasoning_effort: str | None = None
    """For templates that know it; "none" turns the reasoning off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One conversation and how to answer it."""

    input: ChatInput
    generation: GenerationRequest
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    allows_parallel_calls: bool = True
    answer_form: StructuredOutputsParams | None = None
    """Form of an answer that is no call; verified already."""
    max_reasoning_tokens: int | None = None
    """The reasoning is ended after this many tokens; None: no limit."""
    shows_reasoning: bool = True
    echoes_last_message: bool = False
    """Begin the answer with the text of the assistant's message that it continues."""
    prompt_token_ids: Sequence[int] | None = None
    """The prompt, if another engine has rendered it already: `input` is not rendered then."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the processor of the model's media."""
    add_special_tokens: bool = False
    """Let the tokenizer add its special tokens; chat templates usually write them."""
