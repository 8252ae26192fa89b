"""Calls written in Python: `[get_weather(city="Ulm", days=3), now()]`; the complete answer is one list.

Only the end of the list shows whether it consists of calls. If one member is not a call or one argument is not a
literal, the complete text is content. So nothing is returned before the end of the list.
"""

from collections.abc import Mapping
from typing import Any

from octavo.frontend.tools.keyed_arguments import keyed_arguments
from octavo.frontend.tools.parser import AnswerFrame, CallForm, Parsed, ToolParser
from octavo.frontend.tools.python_calls import CALL_NAME, CutError, NotCallsError, read_call_list
from octavo.frontend.tools.tag_formats import any_of, fixed, sequence, tag

_OPENING_TAGS = ("<|python_start|>", "<|python_tag|>")
_CLOSING_TAGS = ("<|python_end|>",)

_NO_CALLS = r"[\s\x1c-\x1f]*([^\s\x1c-\x1f\[<](.|\n)*|<([^|](.|\n)*)?)?"
"""Text that starts neither with a list nor with a possible tag."""

_SEPARATOR = ", "


def _any_of(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return a format that matches one of the texts, or the empty text."""
    return any_of(fixed(text) for text in ("", *texts))


class PythonicParser(ToolParser):
    """A list of Python calls, with nothing but its tags around it."""

    tags = (*_OPENING_TAGS, *_CLOSING_TAGS)
    frame = AnswerFrame(
        begin=sequence({"type": "regex", "pattern": r"[ \t\r\n]*"}, _any_of(_OPENING_TAGS), fixed("[")),
        end=sequence(fixed("]"), _any_of(_CLOSING_TAGS)),
        other_text=_NO_CALLS,
    )

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls; see `ToolParser.parse`."""
        inner = text.lstrip()
        for mark in _OPENING_TAGS:
            inner = inner.removeprefix(mark).lstrip()
        if not inner.startswith("["):
            if not is_final and (not inner or any(mark.startswith(inner) for mark in _OPENING_TAGS)):
                return Parsed("")
            return Parsed(text, is_plain=True)
        try:
            calls, end = read_call_list(inner)
        except CutError as cut:
            if not is_final:
                return Parsed("")
            return Parsed("", cut.calls) if cut.calls else Parsed(text)
        except NotCallsError:
            return Parsed(text, is_plain=True)
        behind = inner[end:].lstrip()
        for mark in _CLOSING_TAGS:
            behind = behind.removeprefix(mark).lstrip()
        if behind and not any(mark.startswith(behind) for mark in _CLOSING_TAGS):
            return Parsed(text, is_plain=True)
        return Parsed("", calls) if is_final else Parsed("")

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return a call with required arguments first and with values in JSON, which the parser accepts too.

        `None` if a name is not valid in Python, or if the schema constrains more than each argument by itself.
        """
        call = python_call(name, schema)
        return None if call is None else CallForm((), call, _SEPARATOR)


def python_call(name: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the format of a call with JSON arguments; `None` as in `keyed_arguments`, or for an invalid name."""
    arguments = keyed_arguments(schema, "=", _SEPARATOR)
    if arguments is None or not CALL_NAME.fullmatch(name):
        return None
    return tag(f"{name}(", arguments, ")")
