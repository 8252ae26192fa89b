"""Scans incomplete JSON: finds where a value ends and which part of it is certain. Builds no objects."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]+")
_UNITS = re.compile(r"(?:[^\\]++|\\(?:u[0-9a-fA-F]{4}|[^u]))*+")
"""The content of a string, as complete characters and escapes."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?P<end>"|\\?\Z)', re.DOTALL)
"""A string, which may be incomplete."""
_CONTROL = re.compile(r"[\x00-\x1f]")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}


class _Expected(Enum):
    """What may follow in a value."""

    VALUE = 0
    FIRST_VALUE = 1
    KEY = 2
    FIRST_KEY = 3
    MORE = 4


_MAY_END = (_Expected.FIRST_VALUE, _Expected.FIRST_KEY, _Expected.MORE)
"""States in which an object or a list may close."""


@dataclass(frozen=True, slots=True)
class Span:
    """The position of a value in a text."""

    start: int
    limit: int
    """End of the part of the text that belongs to the value, whatever follows."""
    is_whole: bool
    """Whether `limit` is the end of the value."""
    is_broken: bool = False
    """Whether the text after `limit` cannot be part of a value."""


def skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is not white space."""
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def read_value(text: str, position: int) -> Span:
    """Scan one JSON value, regardless of the text after it.

    Strings may contain line breaks and invalid escapes, because models write them (see `json_text`). The caller must
    see everything that the model wrote.

    Args:
        text: the text, which may end inside the value.
        position: the position of its first character.
    """
    start = limit = position
    closers: list[str] = []
    expected = _Expected.VALUE
    while True:
        position = skip_space(text, limit)
        if position == len(text):
            return Span(start, limit, is_whole=False)
        character = text[position]
        token = Span(position, position + 1, is_whole=True)
        if closers and character == closers[-1] and expected in _MAY_END:
            closers.pop()
            expected = _Expected.MORE
        elif expected is _Expected.MORE:
            if character != ",":
                token = Span(limit, limit, is_whole=False, is_broken=True)
            expected = _Expected.KEY if closers[-1] == "}" else _Expected.VALUE
        elif expected in (_Expected.KEY, _Expected.FIRST_KEY):
            token, expected = _read_key(text, position), _Expected.VALUE
        elif character in _CLOSING:
            closers.append(_CLOSING[character])
            expected = _Expected.FIRST_KEY if character == "{" else _Expected.FIRST_VALUE
        else:
            token, expected = _read_scalar(text, position), _Expected.MORE
        limit = token.limit
        if not token.is_whole:
            return Span(start, limit, is_whole=False, is_broken=token.is_broken)
        if not closers:
            return Span(start, limit, is_whole=True)


def read_members(text: str, position: int) -> Iterator[tuple[str | None, Span]]:
    """Yield the members of an object that have arrived: each key with the span of its value.

    The last item has no key. Its span is that of the object: complete, open or broken.

    Args:
        text: the text, which may end inside the object.
        position: the position of its opening brace.
    """
    start, limit = position, position + 1
    position = skip_space(text, limit)
    if text[position : position + 1] == "}":
        yield None, Span(start, position + 1, is_whole=True)
        return
    while True:
        key = _read_key(text, skip_space(text, limit))
        if not key.is_whole:
            yield None, Span(start, key.limit, is_whole=False, is_broken=key.is_broken)
            return
        value = read_value(text, skip_space(text, key.limit))
        yield string_text(text, _read_string(text, key.start)), value
        limit = value.limit
        if not value.is_whole:
            yield None, Span(start, limit, is_whole=False, is_broken=value.is_broken)
            return
        position = skip_space(text, limit)
        if text[position : position + 1] != ",":
            is_whole = text[position : position + 1] == "}"
            is_broken = not is_whole and position < len(text)
            yield None, Span(start, position + 1 if is_whole else limit, is_whole=is_whole, is_broken=is_broken)
            return
        limit = position + 1


def string_text(text: str, span: Span) -> str:
    """Return the certain part of a JSON string, decoded. A lone surrogate becomes U+FFFD."""
    body = text[span.start + 1 : span.limit - 1] if span.is_whole else text[span.start + 1 : span.limit]
    units = _UNITS.match(body)
    assert units is not None
    valid = _ESCAPE.sub(lambda found: found[0] if found[1] in '"\\/bfnrtu' else rf"\\{found[1]}", units[0])
    decoded: str = json.loads(f'"{valid}"', strict=False)
    if not span.is_whole and "\ud800" <= decoded[-1:] <= "\udbff":
        decoded = decoded[:-1]  # the other half of a surrogate pair may follow
    return decoded.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def json_text(text: str) -> str:
    """Return a possibly incomplete piece of JSON with the control characters in its strings escaped."""
    # perf: the first check is many times faster, and usually succeeds
    if text.isprintable() or not _CONTROL.search(text):
        return text
    return StringEscaper().push(text)


class StringEscaper:
    """Escapes control characters in the strings of JSON that arrives in pieces. The cuts do not affect the result."""

    def __init__(self) -> None:
        self._open = ""
        """State of the string that the next piece continues: its quote, and a backslash at its end."""

    def push(self, text: str) -> str:
        """Return the next piece with its control characters escaped."""
        before, self._open = self._open, ""
        return _STRING.sub(self._escaped, before + text)[len(before) :]

    def _escaped(self, string: re.Match[str]) -> str:
        if string["end"] != '"':
            self._open = f'"{string["end"]}'
        return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], string[0])


def _read_scalar(text: str, position: int) -> Span:
    character = text[position]
    if character == '"':
        return _read_string(text, position)
    if literal := _LITERALS.get(character):
        there = text[position : position + len(literal)]
        if there == literal:
            return Span(position, position + len(literal), is_whole=True)
        is_open = literal.startswith(there) and position + len(there) == len(text)
        return Span(position, position, is_whole=False, is_broken=not is_open)
    written = _NUMBER_CHARACTERS.match(text, position)
    if written is None:
        return Span(position, position, is_whole=False, is_broken=True)
    if written.end() == len(text):
        return Span(position, position, is_whole=False)  # more digits may follow
    is_whole = _NUMBER.fullmatch(written[0]) is not None
    return Span(position, written.end() if is_whole else position, is_whole=is_whole, is_broken=not is_whole)


def _read_key(text: str, position: int) -> Span:
    """Scan a key, that is, a string and the colon after it."""
    key = _read_string(text, position)
    if not key.is_whole:
        return key
    colon = skip_space(text, key.limit)
    if text[colon : colon + 1] == ":":
        return Span(position, colon + 1, is_whole=True)
    return Span(position, key.limit, is_whole=False, is_broken=colon < len(text))


def _read_string(text: str, position: int) -> Span:
    if text[position : position + 1] != '"':
        return Span(position, position, is_whole=False, is_broken=position < len(text))
    end = position
    while (end := text.find('"', end + 1)) >= 0:
        if _num_backslashes(text, end) % 2 == 0:
            return Span(position, end + 1, is_whole=True)
    return Span(position, len(text), is_whole=False)


def _num_backslashes(text: str, end: int) -> int:
    """Return the number of backslashes directly before a position."""
    start = end
    while text[start - 1] == "\\":
        start -= 1
    return end - start
