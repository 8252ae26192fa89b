"""Base class for Python calls after a mark, and its formats.

Nothing is returned before the closing mark: only then is it certain that everything in between is a call.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.marked import CallMatch, MarkedParser
from octavo.frontend.tools.parser import CallForm, Section
from octavo.frontend.tools.python_calls import CutError, NotCallsError, read_call_lines, read_call_list
from octavo.frontend.tools.pythonic import python_call


class PythonMarkedParser(MarkedParser):
    """Python calls between two marks, in a list or one per line."""

    closing: ClassVar[str]
    separator: ClassVar[str]

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read all calls up to the closing mark."""
        start = skip_space(text, position)
        try:
            if text.startswith("[", start):
                calls, end = read_call_list(text, start)
            else:
                calls, end = read_call_lines(text, start, self.closing)
        except CutError as cut:
            if not is_final:
                return CallMatch(None)
            return CallMatch(None if cut.calls else len(text), cut.calls)
        except NotCallsError:
            return CallMatch(start)
        return CallMatch(end, calls)

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return a call with required arguments first and with values in JSON, which the parser accepts too."""
        call = python_call(name, schema)
        return None if call is None else CallForm((), call, self.separator)


class Olmo3Parser(PythonMarkedParser):
    """Olmo 3: `<function_calls>f(a=1)</function_calls>`, one call per line."""

    openings = (("<function_calls>",),)
    tags = ("<function_calls>", "</function_calls>")
    closing, separator = tags[1], "\n"
    sections = (Section(tags[0], tags[0], tags[1]),)


class Lfm2Parser(PythonMarkedParser):
    """LFM2: `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`."""

    openings = (("<|tool_call_start|>",),)
    tags = ("<|tool_call_start|>", "<|tool_call_end|>")
    closing, separator = tags[1], ", "
    sections = (Section(tags[0], f"{tags[0]}[", f"]{tags[1]}"),)
