"""What a tool parser is: a pure function from the text so far to content and calls. Holds no stream and no format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.frontend.tools.call_id import new_call_id


@dataclass(slots=True)
class ToolCall:
    """One call, as far as it has been written."""

    name: str
    arguments: str
    """JSON text; not yet a whole one while the call is being written, or when it was cut."""


@dataclass(slots=True)
class Parsed:
    """What a text says."""

    content: str
    """A beginning of the text: what stands before the first call. Text behind a call is no content."""
    calls: list[ToolCall] = field(default_factory=list)
    is_plain: bool = False
    """True when all that follows is content too."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    is_strict: bool = False
    """A call that the model makes of its own accord must obey the schema too."""
    param: str = "tools"
    """The caller's name of it, for errors."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a format writes a call of one function, for a grammar."""

    trigger: str
    """What such a call begins with, and no other text; without meaning where calls are all of an answer."""
    tag: Mapping[str, Any]
    """A "tag" as structural tags have them (docs/structured-output.md): begin, content and end."""
    separator: str
    """What stands between two calls."""
    alone: Mapping[str, Any] | None = None
    """The call as a structural tag's format, where an answer is either calls or JSON: none of its fixed texts may
    begin as JSON does. None: the tag's do not."""


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """How a format writes an answer that is calls and nothing else, for a grammar.

    Begin and end are formats of a structural tag, and there is no answer that fits both `begin` and `other_text`.
    """

    begin: Mapping[str, Any]
    """What stands before the first call."""
    end: Mapping[str, Any]
    """What stands behind the last one."""
    other_text: str
    """A regular expression of the answers that do not call."""


def json_tag(begin: str, schema: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Return the tag of a call whose arguments are JSON."""
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


class ToolParser(ABC):
    """Finds the calls of one format in a text.

    A text that is shown only grows. So for texts `a` and `a + b`: what `parse(a, is_final=False)` gives as content and
    as arguments is a beginning of what `parse(a + b, ...)` gives, its calls are the first ones of the other's, and
    their names are the same. What might still become a call is held back until it is one or until `is_final`.
    And content is settled: without a call, `parse(a + b)` is the content of `a` and then `parse` of what is left.

    Args:
        tools: the functions of the request.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    """Marks of the format that may be special tokens, which the text must then show."""
    frame: ClassVar[AnswerFrame | None] = None
    """Where calls are all of an answer, what stands around them; None: they may stand in text."""
    new_call_id = staticmethod(new_call_id)
    """Makes the id of a call; a model may have been trained on ids of one form."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        self.tools = tools

    @abstractmethod
    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls of a text that goes on, or of a whole one."""

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return how the format writes a call, None where no grammar can bind it.

        Args:
            name: of the function.
            schema: what its arguments must obey.
        """
        return None


def shown_length(text: str, tags: Sequence[str], start: int = 0) -> int:
    """Return how much of a text without tags is settled: all but its end, where white space or a tag may begin.

    Args:
        text: a text that goes on.
        tags: what may come.
        start: no tag begins before this.
    """
    end = len(text) - partial_tag(text, tags, start)
    while end and text[end - 1].isspace():
        end -= 1
    return end


def partial_tag(text: str, tags: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest end of a text that one of these tags begins with."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text) - start), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest
