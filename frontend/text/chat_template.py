"""Messages to prompt text: renders a model's chat template in a sandbox.

Rendering is pure and synchronous; the caller decides on which thread and for how long. Nothing here
tokenizes.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.frontend.text.content_format import ContentFormat, TemplateShape
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError

Message: TypeAlias = Mapping[str, Any]
"""A message of the OpenAI API: role, content (a string, a list of parts or None) and more."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the key each keeps its text under."""

_END_MARK = "\ue000octavo-final-message-ends-here\ue000"
"""Put after a final message that is to be continued, to find its end in the rendered text."""

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the expressions of a template can raise in a sandbox."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja, in the dialect of Hugging Face's `apply_chat_template`.
        special_tokens: what templates know as `bos_token`, `eos_token`, ...

    Raises:
        InvalidRequestError: the template does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template, shape = _compile(source)
        self._special_tokens = dict(special_tokens)
        self.content_format: ContentFormat = shape.content_format
        """What the template expects of a message's content."""
        self._wraps_strings = shape.content_format == "openai" and not shape.accepts_strings

    @classmethod
    def for_model(cls, template: str | None, tokenizer: Tokenizer) -> "ChatTemplate":
        """Return the template the user chose, else the model's own.

        Args:
            template: `--chat-template`: a file or the text itself.
            tokenizer: of the model, for its own template and special tokens.

        Raises:
            InvalidRequestError: there is none, or it does not parse.
        """
        source = tokenizer.chat_template if template is None else _read(template)
        if source is None:
            raise InvalidRequestError(
                "this model has no chat template: start the engine with --chat-template (a Jinja file or the text "
                "itself), or send a plain prompt to the completions API",
                "messages",
            )
        return cls(source, tokenizer.special_tokens)

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
            messages: the conversation; left as it is.
            add_generation_prompt: end with what makes the model answer.
            continue_final_message: end inside the last message, so the model goes on with it.
            tools: JSON schemas of functions the model may call.
            documents: texts for templates that know retrieval.
            **kwargs: further variables of the template (`chat_template_kwargs`).

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one of them to false",
                "continue_final_message",
            )
        conversation = [self._convert(message) for message in messages]
        if continue_final_message:
            _mark_end(conversation)
        variables = self._special_tokens | kwargs
        variables |= {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        variables |= {"tools": tools, "documents": documents}
        try:
            text = self._template.render(variables)
        except _RENDER_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {reason}", "messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _convert(self, message: Message) -> dict[str, Any]:
        """Return a copy of the message in the form the template expects."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError('a message must be an object with a "role"', "messages")
        converted = {**message, "content": self._convert_content(message.get("content"))}
        if calls := message.get("tool_calls"):
            if not isinstance(calls, Sequence):
                raise InvalidRequestError("tool_calls must be a list", "messages")
            converted["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return converted

    def _convert_content(self, content: object) -> str | list[dict[str, str]]:
        if content is None:
            content = [] if self._wraps_strings else ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._wraps_strings else content
        if not isinstance(content, Sequence):
            raise InvalidRequestError("a message's content must be a string or a list of parts", "messages")
        texts = [_part_text(part) for part in content]
        if self.content_format == "string":
            return "\n".join(texts)
        return [{"type": "text", "text": text} for text in texts]


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequestError(f"content parts of type {kind!r} are not supported: only text is", "messages")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"a content part of type {kind!r} needs a string {_TEXT_PARTS[kind]!r}", "messages")
    return text


def _with_parsed_arguments(call: object) -> object:
    """Return a tool call whose arguments are an object, as templates expect, not JSON text, as the API has it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError('a tool call must be an object with a "function"', "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InvalidRequestError(f"the arguments of a tool call are not JSON: {error}", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    """Put the mark, and a space, at the end of the last message's text."""
    content = conversation[-1]["content"] if conversation else ""
    if not content:
        raise InvalidRequestError("continue_final_message needs a last message with text", "continue_final_message")
    # The space shows whether the template strips messages: then the prompt must not end in white space either.
    if isinstance(content, str):
        conversation[-1]["content"] = content + _END_MARK + " "
    else:
        content[-1]["text"] += _END_MARK + " "


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequestError(
            "the chat template leaves the last message out or changes it, so it cannot be continued",
            "continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _read(template: str) -> str:
    """Return the text of `--chat-template`, which is a file's name or the text itself."""
    if any(character in template for character in "{}\n"):
        return template
    try:
        return Path(template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--chat-template {template!r} cannot be read: {error}", "messages") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, TemplateShape]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source), TemplateShape(environment.parse(source))
    except jinja2.TemplateError as error:
        raise InvalidRequestError(
            f"the chat template does not parse: {error}; give another with --chat-template", "messages"
        ) from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; for a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    """Let a template refuse a conversation, for example roles that do not alternate."""
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002  (templates may pass it by this name)
    return datetime.now().strftime(format)
