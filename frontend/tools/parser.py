"""`ToolParser`: a pure function from the text so far to content and calls. Independent of streaming and formats."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.frontend.tools.call_id import new_call_id
from octavo.frontend.tools.subschema import dereferenced


@dataclass(slots=True)
class ToolCall:
    """One call, as far as the model has written it."""

    name: str
    arguments: str
    """JSON text of the arguments; incomplete while the call is being written or if it was truncated."""
    is_malformed: bool = False
    """Whether the text after `arguments` cannot be part of them: the model wrote something other than a call."""
    id: str | None = None
    """The id that the model wrote; `None` if the format has no ids."""


@dataclass(slots=True)
class Parsed:
    """The result of parsing a text."""

    content: str
    """Text before the first call. Text after a call is not content."""
    calls: list[ToolCall] = field(default_factory=list)
    is_plain: bool = False
    """Whether all further text is content too."""
    length: int | None = None
    """Length of the text from which `content` was made; `None` if all of it is content."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    is_strict: bool = False
    """Whether the schema also constrains calls under `tool_choice` auto."""
    param: str = "tools"
    """Name of the request's field, for errors."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a format writes a call of one function; used to build the grammar."""

    marks: tuple[str, ...]
    """Texts in the tag's `begin` at which a call in free text may start; empty: calls cannot occur in free text."""
    tag: Mapping[str, Any]
    """A tag of a structural tag (docs/structured-output.md): begin, content and end."""
    separator: str
    """Text between two calls."""
    alone: Mapping[str, Any] | None = None
    """The call's format for answers that are either calls or JSON: its fixed texts must not start like JSON. `None` if
    `tag` has no such texts."""


@dataclass(frozen=True, slots=True)
class Section:
    """The texts around all calls of an answer; used to build the grammar. Text may precede them."""

    mark: str
    """The text with which only this section starts."""
    begin: str
    """Text before the first call; starts with the mark."""
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """How a format writes an answer that consists only of calls; used to build the grammar.

    `begin` and `end` are formats of a structural tag. No answer may match both `begin` and `other_text`.
    """

    begin: Mapping[str, Any]
    """The text before the first call."""
    end: Mapping[str, Any]
    """The text after the last call."""
    other_text: str
    """A regular expression that matches answers without calls."""


class ToolParser(ABC):
    """Parses the calls of one format.

    A stream only grows. So for texts `a` and `a + b`, the content and the arguments of `parse(a, is_final=False)` are
    prefixes of those of `parse(a + b, ...)`. Its calls are the first calls of the longer text, with the same names.
    Text that may still become a call is held back until it is one, or until `is_final`. Returned content is final:
    without a call, `parse(a + b)` is the content of `a` followed by `parse` of the rest.

    Args:
        tools: the functions of the request.
    """

    tags: tuple[str, ...] = ()
    """Tags of the format that may be special tokens; detokenization must not skip them."""
    frame: ClassVar[AnswerFrame | None] = None
    """The text around the calls, if an answer consists only of calls; `None` if calls may occur within text."""
    sections: ClassVar[tuple[Section, ...]] = ()
    """The alternative texts around all calls of an answer; empty if there are none."""
    new_call_id = staticmethod(new_call_id)
    """Generates the id of a call. Some models require a certain format."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        self.tools = tools

    def properties(self, name: str) -> Mapping[str, Any]:
        """Return the schemas of a function's arguments by name, with references resolved."""
        for tool in self.tools:
            if tool.name == name:
                properties = tool.parameters.get("properties")
                if not isinstance(properties, Mapping):
                    return {}
                return {key: dereferenced(inner, tool.parameters) for key, inner in properties.items()}
        return {}

    @abstractmethod
    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the content and calls of an incomplete or final text."""

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return how the format writes a call; `None` if no grammar can constrain it.

        Args:
            name: the function's name.
            schema: the schema of its arguments.
        """
        return None


def shown_length(text: str, tags: Sequence[str], start: int = 0) -> int:
    """Return the length of the text without a tag, or white space, that may have begun at its end.

    Args:
        text: the text so far.
        tags: the tags that may follow.
        start: position before which no tag starts.
    """
    end = len(text) - partial_tag(text, tags, start)
    while end and text[end - 1].isspace():
        end -= 1
    return end


def partial_tag(text: str, tags: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest suffix of a text that is a prefix of one of the tags."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text) - start), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


def may_begin(text: str, position: int, marks: Sequence[str]) -> bool:
    """Return whether one of the marks begins at a position and the text ends inside it."""
    num_left = len(text) - position
    return any(num_left < len(mark) and mark.startswith(text[position:]) for mark in marks)
