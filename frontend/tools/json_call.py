"""Parses calls written as JSON objects, `{"name": ..., "arguments": {...}}`, which most formats wrap in tags."""

from collections.abc import Sequence

from octavo.frontend.tools.json_reader import Span, json_text, read_members, read_value, skip_space, string_text
from octavo.frontend.tools.marked import CallMatch
from octavo.frontend.tools.parser import ToolCall

ARGUMENT_KEYS = ("arguments", "parameters")
"""Names of the member with the arguments; models use both."""


def read_call(
    text: str,
    position: int,
    is_final: bool,
    *,
    argument_keys: Sequence[str] = ARGUMENT_KEYS,
    name_key: str = "name",
    needs_arguments: bool = False,
) -> CallMatch:
    """Parse one object that may be a call. Its members may have any order.

    It counts as a call once it has a name and the start of its arguments: an object, a string with an object, or null.

    Args:
        text: the text, which may end inside the object.
        position: the position of the expected opening brace.
        is_final: whether no more text follows.
        argument_keys: accepted names of the member with the arguments.
        name_key: name of the member with the function's name.
        needs_arguments: whether an object without arguments is no call; otherwise its arguments are `{}`.
    """
    if text[position : position + 1] != "{":
        is_open = position == len(text) and not is_final
        return CallMatch(None if is_open else position)
    name: str | None = None
    arguments: str | None = None
    is_malformed = False
    whole = Span(position, position, is_whole=False)
    for key, span in read_members(text, position):
        if key is None:
            whole = span
        elif key == name_key and name is None:
            name = string_text(text, span) if span.is_whole and text[span.start] == '"' else ""
        elif key in argument_keys and arguments is None:
            arguments, is_malformed = arguments_text(text, span, is_final), span.is_broken
            if arguments is None and span.limit < len(text):
                name = ""  # a type that arguments cannot have
    end = whole.limit if whole.is_whole or whole.is_broken else None
    if arguments is None and whole.is_whole and not needs_arguments:
        arguments = "{}"
    if name and arguments is not None:
        return CallMatch(end, [ToolCall(name, arguments, is_malformed)])
    return CallMatch(len(text) if end is None and is_final else end)


def read_calls(
    text: str, position: int, is_final: bool, *, name_key: str = "name", needs_arguments: bool = False
) -> CallMatch:
    """Parse an array of calls. An element that is not a call ends the array.

    Args:
        text: the text, which may end inside the array.
        position: the position of its opening bracket.
        is_final: whether no more text follows.
        name_key: as in `read_call`.
        needs_arguments: as in `read_call`.
    """
    if text[position : position + 1] != "[":
        is_open = position == len(text) and not is_final
        return CallMatch(None if is_open else position)
    calls: list[ToolCall] = []
    while True:
        match = read_call(
            text,
            skip_space(text, position + 1),
            is_final,
            name_key=name_key,
            needs_arguments=needs_arguments,
        )
        calls += match.calls
        if not match.calls or match.end is None:
            return CallMatch(match.end, calls)
        position = skip_space(text, match.end)
        if text[position : position + 1] != ",":
            return CallMatch(None if position == len(text) and not is_final else position, calls)


def arguments_text(text: str, span: Span, is_final: bool) -> str | None:
    """Return the certain part of the arguments' JSON text; all of it if the text is final.

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


def read_named_call(text: str, position: int, is_final: bool, name: str) -> CallMatch:
    """Parse a bare object of arguments, at least whose first character has arrived."""
    span = read_value(text, position)
    call = ToolCall(name, arguments_text(text, span, is_final) or "", span.is_broken)
    return CallMatch(span.limit if span.is_whole or span.is_broken else None, [call])
