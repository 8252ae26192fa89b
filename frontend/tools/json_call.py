"""Parses calls written as JSON objects, `{"name": ..., "arguments": {...}}`, which most formats wrap in tags."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from octavo.frontend.tools.json_reader import Span, json_text, read_members, read_value, skip_space, string_text
from octavo.frontend.tools.parser import ToolCall


class CallStatus(Enum):
    """Whether an object in a text is a call."""

    CALL = "call"
    NO_CALL = "no call"
    OPEN = "open"
    """Not known yet: too little of it is there."""


@dataclass(frozen=True, slots=True)
class CallMatch:
    """The result of parsing at one position."""

    status: CallStatus
    end: int | None
    """Where parsing continues; None: the object is incomplete."""
    call: ToolCall | None = None


def read_call(
    text: str, position: int, is_final: bool, argument_keys: Sequence[str], *, needs_arguments: bool = False
) -> CallMatch:
    """Parse one object that may be a call, with its members in any order.

    It counts as a call once it has a name and the start of its arguments: an object, a string with one, or null.

    Args:
        text: may end inside the object.
        position: of the expected opening brace.
        is_final: no more text will follow.
        argument_keys: accepted names of the member with the arguments.
        needs_arguments: an object without arguments is not a call; otherwise its arguments are `{}`.
    """
    if text[position : position + 1] != "{":
        is_open = position == len(text) and not is_final
        return CallMatch(CallStatus.OPEN if is_open else CallStatus.NO_CALL, None if is_open else position)
    name: str | None = None
    arguments: str | None = None
    is_malformed = False
    whole = Span(position, position, is_whole=False)
    for key, span in read_members(text, position):
        if key is None:
            whole = span
        elif key == "name" and name is None:
            name = string_text(text, span) if span.is_whole and text[span.start] == '"' else ""
        elif key in argument_keys and arguments is None:
            arguments, is_malformed = arguments_text(text, span, is_final), span.is_broken
            if arguments is None and span.limit < len(text):
                name = ""  # not a valid type for arguments
    end = whole.limit if whole.is_whole or whole.is_broken else None
    if arguments is None and whole.is_whole and not needs_arguments:
        arguments = "{}"
    if name and arguments is not None:
        return CallMatch(CallStatus.CALL, end, ToolCall(name, arguments, is_malformed))
    if end is not None or is_final:
        return CallMatch(CallStatus.NO_CALL, len(text) if end is None else end)
    return CallMatch(CallStatus.OPEN, None)


def read_calls(text: str, position: int, is_final: bool, argument_keys: Sequence[str]) -> CallMatch | list[ToolCall]:
    """Parse an array of calls; return the calls, or the match of the element that is not a call.

    Args:
        text: may end inside the array.
        position: of its opening bracket.
        is_final: no more text will follow.
        argument_keys: as for `read_call`.
    """
    calls: list[ToolCall] = []
    position += 1
    while True:
        match = read_call(text, skip_space(text, position), is_final, argument_keys)
        if match.call is None:
            return calls or match
        calls.append(match.call)
        if match.end is None:
            return calls
        position = skip_space(text, match.end)
        if text[position : position + 1] != ",":
            return calls
        position += 1


def arguments_text(text: str, span: Span, is_final: bool) -> str | None:
    """Return the JSON text of the arguments as far as it is certain, or all of it if the text is final.

    Returns:
        None if the value is not an object, a string with an object, or null.
    """
    if span.start == len(text):
        return None
    limit = len(text) if is_final and not (span.is_whole or span.is_broken) else span.limit
    match text[span.start]:
        case "{":
            return json_text(text[span.start : limit])
        case '"':
            return string_text(text, span)
        case "n" if span.is_whole:
            return "{}"
    return None


def read_named_call(text: str, position: int, is_final: bool, name: str) -> tuple[ToolCall, int | None]:
    """Parse a bare object of arguments; return the call and the object's end, None while it is incomplete."""
    span = read_value(text, position)
    call = ToolCall(name, arguments_text(text, span, is_final) or "", span.is_broken)
    return call, span.limit if span.is_whole or span.is_broken else None
