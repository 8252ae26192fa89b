"""Calls written in Python: `[get_weather(city="Ulm", days=3), now()]`, the whole answer being one list.

Whether a list is one of calls is known at its end: one member that is none, or an argument that is no literal, and
all of it is content. So nothing of it is shown before its end.
"""

from octavo.frontend.tools.parser import Parsed, ToolParser
from octavo.frontend.tools.python_calls import Cut, NotCalls, read_call_list

_OPENING_TAGS = ("<|python_start|>", "<|python_tag|>")
_CLOSING_TAGS = ("<|python_end|>",)


class PythonicParser(ToolParser):
    """A list of Python calls, with nothing but its tags around it."""

    tags = (*_OPENING_TAGS, *_CLOSING_TAGS)

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls; see `ToolParser.parse`."""
        inner = text.lstrip()
        for tag in _OPENING_TAGS:
            inner = inner.removeprefix(tag).lstrip()
        if not inner.startswith("["):
            if not is_final and (not inner or any(tag.startswith(inner) for tag in _OPENING_TAGS)):
                return Parsed("")
            return Parsed(text, is_plain=True)
        try:
            calls, end = read_call_list(inner)
        except Cut as cut:
            if not is_final:
                return Parsed("")
            return Parsed("", cut.calls) if cut.calls else Parsed(text)
        except NotCalls:
            return Parsed(text, is_plain=True)
        behind = inner[end:].lstrip()
        for tag in _CLOSING_TAGS:
            behind = behind.removeprefix(tag).lstrip()
        if behind and not any(tag.startswith(behind) for tag in _CLOSING_TAGS):
            return Parsed(text, is_plain=True)
        return Parsed("", calls) if is_final else Parsed("")
