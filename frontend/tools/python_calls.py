"""Parses a list of Python calls with literal keyword arguments, and writes the arguments as JSON. Evaluates nothing."""

import json
import math
import re
import sys

from octavo.frontend.tools.keyed_arguments import KEY
from octavo.frontend.tools.parser import ToolCall, may_begin

MAX_DEPTH = 64
"""Maximum nesting of lists and dicts."""

CALL_NAME = re.compile(r"[^\W\d][\w.]*")
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NUMBER_CHARACTERS = re.compile(r"[-+.\w]+")
_QUOTES = re.compile(r"'''|\"\"\"|'|\"")
_UNITS = {
    quote: re.compile(rf"(?:\\(?:x[0-9a-fA-F]{{2}}|u[0-9a-fA-F]{{4}}|U[0-9a-fA-F]{{8}}|[^xuUN])|{plain})*+", re.DOTALL)
    for quote, plain in (
        ("'", r"[^\\'\n]++"),
        ('"', r'[^\\"\n]++'),
        ("'''", r"[^\\']++|'(?!'')"),
        ('"""', r'[^\\"]++|"(?!"")'),
    )
}
"""Regular expressions for the content of a string, by its quotes: complete escapes and characters."""
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(
    r"\\([xuU](?P<hex>(?<=x)[0-9a-fA-F]{2}|(?<=u)[0-9a-fA-F]{4}|(?<=U)[0-9a-fA-F]{8})|(?P<octal>[0-7]{1,3})|.)",
    re.DOTALL,
)
_OPEN_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
"""Escapes by the character after the backslash. Others keep their backslash, as in Python. The escaped slash comes from
JSON, which some models write."""


class NotCallsError(Exception):
    """The text is not a list of calls."""


class CutError(Exception):
    """The text ends inside the list.

    Args:
        calls: the calls so far; the last one has its arguments so far.
    """

    def __init__(self, calls: list[ToolCall]) -> None:
        super().__init__("the text ends inside the list")
        self.calls = calls


def read_call_list(text: str, position: int = 0) -> tuple[list[ToolCall], int]:
    """Parse a list of calls.

    Args:
        text: the text; any text may follow the list.
        position: the position of the opening bracket of the list.

    Returns:
        The calls, and the position of the end of the list.

    Raises:
        CutError: the text ends inside the list.
        NotCallsError: the list does not consist of calls.
    """
    reader = _Reader(text, position + 1)
    try:
        return reader.read_list(), reader.position
    except _AtEndError:
        raise CutError(reader.calls_so_far()) from None


def read_call_lines(text: str, position: int, closing: str) -> tuple[list[ToolCall], int]:
    """Parse calls with white space between them, up to a closing mark; otherwise like `read_call_list`."""
    reader = _Reader(text, position)
    try:
        return reader.read_lines(closing), reader.position
    except _AtEndError:
        raise CutError(reader.calls_so_far()) from None


class _AtEndError(Exception):
    """The text has ended."""


class _Reader:
    """Parses a text in one pass and writes JSON on the way, so that truncated text yields partial arguments."""

    def __init__(self, text: str, position: int) -> None:
        self.position = position
        self._text = text
        self._calls: list[ToolCall] = []
        self._name: str | None = None
        """Name of the call that is being read."""
        self._json: list[str] = []
        """JSON text of its arguments so far."""

    def calls_so_far(self) -> list[ToolCall]:
        if self._name is None:
            return self._calls
        return [*self._calls, ToolCall(self._name, "".join(self._json))]

    def read_list(self) -> list[ToolCall]:
        while True:
            self._read_call()
            if self._expect(",]") == "]" or self._skip_if_next("]"):
                return self._calls

    def read_lines(self, closing: str) -> list[ToolCall]:
        while True:
            self._read_call()
            self._peek()
            if self._text.startswith(closing, self.position):
                self.position += len(closing)
                return self._calls
            if may_begin(self._text, self.position, (closing,)):
                raise _AtEndError

    def _read_call(self) -> None:
        self._peek()
        name = self._match(CALL_NAME)
        if self._peek() != "(":
            raise NotCallsError
        self.position += 1
        self._name, self._json = name, ["{"]
        keys: set[str] = set()
        while not self._skip_if_next(")"):
            key = self._match(KEY)
            if key in keys or self._expect("=") != "=":
                raise NotCallsError
            separator = ", " if keys else ""
            keys.add(key)
            self._peek()
            self._json.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            self._read_value(0)
            if self._expect(",)") == ")":
                break
        self._json.append("}")
        self._calls.append(ToolCall(name, "".join(self._json)))
        self._name = None

    def _read_value(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise NotCallsError
        character = self._peek()
        if character in "'\"":
            self._read_string()
        elif character == "[":
            self._read_items(depth)
        elif character == "{":
            self._read_dict(depth)
        elif character.isdigit() or character in "-+.":
            self._read_number()
        else:
            word = self._match(_WORD)
            if word not in _WORDS:
                raise NotCallsError
            self._json.append(_WORDS[word])

    def _read_items(self, depth: int) -> None:
        self.position += 1
        self._json.append("[")
        is_first = True
        while not self._skip_if_next("]"):
            if not is_first:
                self._json.append(", ")
            is_first = False
            self._read_value(depth + 1)
            if self._expect(",]") == "]":
                break
        self._json.append("]")

    def _read_dict(self, depth: int) -> None:
        self.position += 1
        self._json.append("{")
        is_first = True
        while not self._skip_if_next("}"):
            if self._peek() not in "'\"":
                raise NotCallsError
            if not is_first:
                self._json.append(", ")
            is_first = False
            self._read_string()
            self._expect(":")
            self._json.append(": ")
            self._read_value(depth + 1)
            if self._expect(",}") == "}":
                break
        self._json.append("}")

    def _read_number(self) -> None:
        written = _NUMBER_CHARACTERS.match(self._text, self.position)
        assert written is not None
        self.position = written.end()
        if not _NUMBER.fullmatch(written[0]):
            if self.position == len(self._text):
                raise _AtEndError
            raise NotCallsError
        try:
            value = int(written[0])
        except ValueError:
            try:
                number = float(written[0])
            except ValueError:
                raise NotCallsError from None
            if not math.isfinite(number):
                raise NotCallsError from None
            self._json.append(json.dumps(number))
        else:
            self._json.append(str(value))

    def _read_string(self) -> None:
        quotes = _QUOTES.match(self._text, self.position)
        assert quotes is not None
        units = _UNITS[quotes[0]].match(self._text, quotes.end())
        assert units is not None
        text = json.dumps(_unescape(units[0]), ensure_ascii=False)
        self.position = units.end()
        if self._text.startswith(quotes[0], self.position):
            self.position += len(quotes[0])
            self._json.append(text)
            return
        if self.position == len(self._text) or _OPEN_ESCAPE.fullmatch(self._text, self.position):
            self._json.append(text[:-1])
            raise _AtEndError
        raise NotCallsError

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self.position)
        if found is None:
            raise NotCallsError
        self.position = found.end()
        if self.position == len(self._text):
            raise _AtEndError
        return found[0]

    def _peek(self) -> str:
        """Return the next character that is not white space."""
        while self.position < len(self._text) and self._text[self.position].isspace():
            self.position += 1
        if self.position == len(self._text):
            raise _AtEndError
        return self._text[self.position]

    def _expect(self, characters: str) -> str:
        """Consume one of these characters and return it."""
        character = self._peek()
        if character not in characters:
            raise NotCallsError
        self.position += 1
        return character

    def _skip_if_next(self, character: str) -> bool:
        """Consume this character if it is next."""
        is_there = self._peek() == character
        self.position += is_there
        return is_there


def _unescape(inside: str) -> str:
    """Return the decoded string for its content; a lone surrogate becomes U+FFFD."""
    if "\\" not in inside:
        return inside
    text = _ESCAPE.sub(_unescaped, inside)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _unescaped(escape: re.Match[str]) -> str:
    digits = escape["hex"] or escape["octal"]
    if digits is None:
        return _ESCAPED.get(escape[1], escape[0])
    number = int(digits, 16 if escape["hex"] else 8)
    if number > sys.maxunicode:
        raise NotCallsError
    return chr(number)
