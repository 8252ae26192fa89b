"""Renders messages as prompt text, with a model's chat template in a sandbox.

Rendering is pure and synchronous, and takes a few seconds at most. The caller chooses the thread. This module does not
tokenize.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jinja2

from octavo.frontend.text.content_format import ContentFormat
from octavo.frontend.text.messages import Message, MessageForm
from octavo.frontend.text.template_sandbox import TIME_LIMIT_S, TemplateTimeoutError, compile_template
from octavo.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer

FormatChoice: TypeAlias = Literal["auto", "string", "openai"]

RESERVED_VARIABLES = frozenset({"messages", "self"})
"""Template variables that cannot be set by name."""

_END_MARK = "\ue000octavo-final-message-ends-here\ue000"
"""Appended to a final message that is to be continued, to find the message's end in the rendered text."""

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a template's expressions can raise in the sandbox."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text, in the dialect of Hugging Face's `apply_chat_template`.
        special_tokens: values of the template variables `bos_token`, `eos_token`, ...
        content_format: the format of message contents; auto: detected from the template.
        with_tools: the source to use for conversations with tools, if it is a different one.

    Raises:
        InvalidRequestError: the template does not parse.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        content_format: FormatChoice = "auto",
        with_tools: str | None = None,
    ) -> None:
        self.source = source
        self.source_with_tools = source if with_tools is None else with_tools
        self._compiled = compile_template(source)
        self._special_tokens = dict(special_tokens)
        shape = self._compiled.shape
        self.content_format: ContentFormat = shape.content_format if content_format == "auto" else content_format
        """The format in which the template gets a message's content."""
        wants_parts = self.content_format == "openai"
        self._form = MessageForm(
            wants_parts=wants_parts,
            wraps_strings=wants_parts and not shape.accepts_strings,
            knows_developer="developer" in self._compiled.texts,
        )
        self._with_tools = (
            None if with_tools is None else ChatTemplate(with_tools, special_tokens, content_format=content_format)
        )

    @classmethod
    def for_model(
        cls, template: str | None, tokenizer: "Tokenizer", content_format: FormatChoice = "auto"
    ) -> "ChatTemplate":
        """Return the configured template, or else the model's own.

        Args:
            template: the value of `--chat-template`: a file name or the Jinja text.
            tokenizer: the model's tokenizer, which has the model's templates and special tokens.
            content_format: the format of message contents.

        Raises:
            InvalidRequestError: there is no template, it does not parse, or the engine has no tokenizer.
        """
        tokenizer.require("messages")
        source = tokenizer.chat_template if template is None else _read(template)
        if source is None:
            raise InvalidRequestError(
                "this model has no chat template: start the engine with --chat-template (a Jinja file or the text "
                "itself), or send a plain prompt to the completions API",
                "messages",
            )
        with_tools = tokenizer.chat_templates.get("tool_use") if template is None else None
        return cls(source, tokenizer.special_tokens, content_format=content_format, with_tools=with_tools)

    def has_variable(self, variable: str) -> bool:
        """Return whether the template uses a variable with this name."""
        return variable in self._compiled.variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: the conversation; not modified.
            add_generation_prompt: whether to end with the header of an assistant message.
            continue_final_message: whether to end inside the last message, so that the model continues it.
            tools: JSON schemas of functions that the model may call.
            documents: texts for templates that support retrieval.
            **kwargs: additional template variables (`chat_template_kwargs`).

        Raises:
            InvalidRequestError: the messages are malformed, or the template rejects them.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                **kwargs,
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one of them to false",
                "continue_final_message",
            )
        conversation = self._form.convert(messages)
        if continue_final_message:
            _mark_end(conversation)
        variables = self._special_tokens | kwargs
        variables |= {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        variables |= {"tools": tools, "documents": documents}
        try:
            text = self._compiled.render(variables)
        except TemplateTimeoutError:
            raise InvalidRequestError(
                f"the chat template takes more than {TIME_LIMIT_S:.0f} s for these messages", "messages"
            ) from None
        except _RENDER_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {reason}", "messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    """Append the mark and a space to the last message's text."""
    content = conversation[-1]["content"] if conversation else ""
    if not content:
        raise InvalidRequestError("continue_final_message needs a last message with text", "continue_final_message")
    # The space shows whether the template strips messages. If so, the prompt must not end in white space either.
    if isinstance(content, str):
        conversation[-1]["content"] = content + _END_MARK + " "
    elif "text" in content[-1]:
        content[-1]["text"] += _END_MARK + " "
    else:
        raise InvalidRequestError(
            "continue_final_message needs a last message that ends with text", "continue_final_message"
        )


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequestError(
            "the chat template omits or changes the last message, so it cannot be continued",
            "continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _read(template: str) -> str:
    """Return the text of `--chat-template`, which is a file name or the Jinja text."""
    if any(character in template for character in "{}\n"):
        return template
    try:
        return Path(template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--chat-template {template!r} cannot be read: {error}", "messages") from error
