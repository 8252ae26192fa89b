"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`: what most formats put between their marks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from octavo.frontend.tools.json_reader import Span, json_text, read_members, read_value, skip_space, string_text
from octavo.frontend.tools.parser import ToolCall


class Verdict(Enum):
    """What an object in a text is."""

    CALL = "call"
    NO_CALL = "no call"
    OPEN = "open"
    """Not enough of it is there to tell."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read at one place."""

    verdict: Verdict
    end: int | None
    """Where reading goes on; None: the object has not ended."""
    call: ToolCall | None = None


def read_call(
    text: str, position: int, is_final: bool, argument_keys: Sequence[str], *, needs_arguments: bool = False
) -> Reading:
    """Read one object that may be a call, its members in any order.

    It is one as soon as there is a name and a beginning of arguments: an object, a string that holds one, or null.

    Args:
        text: may end inside the object.
        position: where an opening brace is expected.
        is_final: nothing will follow the text.
        argument_keys: names of the member that holds the arguments.
        needs_arguments: an object that has none is no call; otherwise it calls with `{}`.
    """
    if text[position : position + 1] != "{":
        is_open = position == len(text) and not is_final
        return Reading(Verdict.OPEN if is_open else Verdict.NO_CALL, None if is_open else position)
    name: str | None = None
    arguments: str | None = None
    whole = Span(position, position, is_whole=False)
    for key, span in read_members(text, position):
        if key is None:
            whole = span
        elif key == "name" and name is None:
            name = string_text(text, span) if span.is_whole and text[span.start] == '"' else ""
        elif key in argument_keys and arguments is None:
            arguments = arguments_text(text, span, is_final)
            if arguments is None and span.limit < len(text):
                name = ""  # of no kind that arguments are
    end = whole.limit if whole.is_whole or whole.is_broken else None
    if arguments is None and whole.is_whole and not needs_arguments:
        arguments = "{}"
    if name and arguments is not None:
        return Reading(Verdict.CALL, end, ToolCall(name, arguments))
    if end is not None or is_final:
        return Reading(Verdict.NO_CALL, len(text) if end is None else end)
    return Reading(Verdict.OPEN, None)


def read_calls(text: str, position: int, is_final: bool, argument_keys: Sequence[str]) -> Reading | list[ToolCall]:
    """Read an array of calls; return the calls, or the reading that keeps it from being one.

    Args:
        text: may end inside the array.
        position: of its opening bracket.
        is_final: nothing will follow the text.
        argument_keys: as for `read_call`.
    """
    calls: list[ToolCall] = []
    position += 1
    while True:
        reading = read_call(text, skip_space(text, position), is_final, argument_keys)
        if reading.call is None:
            return calls or reading
        calls.append(reading.call)
        if reading.end is None:
            return calls
        position = skip_space(text, reading.end)
        if text[position : position + 1] != ",":
            return calls
        position += 1


def arguments_text(text: str, span: Span, is_final: bool) -> str | None:
    """Return the JSON text of arguments as far as it is certain, or all of it when nothing follows.

    Returns:
        None when the value is neither an object, nor a string that holds one, nor null.
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


def read_arguments(text: str, position: int, is_final: bool) -> tuple[str, int | None]:
    """Read an object of arguments that stands alone; return its text, and where it ends, None while it goes on."""
    span = read_value(text, position)
    return arguments_text(text, span, is_final) or "", span.limit if span.is_whole or span.is_broken else None
