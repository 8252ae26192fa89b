"""`MarkedParser`: calls after marks, with free text before the first one. Subclasses read the text after the marks."""

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.parser import CallForm, Parsed, ToolCall, ToolParser, may_begin, shown_length
from octavo.frontend.tools.tag_formats import tag


@dataclass(slots=True)
class CallMatch:
    """The result of reading calls at one position."""

    end: int | None
    """Position at which parsing continues; `None` if more text is needed first."""
    calls: list[ToolCall] = field(default_factory=list)
    """The calls. Empty with an `end`: there is no call here. Empty without an `end`: a call may still follow."""


class MarkedParser(ToolParser):
    """Base class for calls after marks. Marked text that is not a call remains content."""

    openings: ClassVar[tuple[tuple[str, ...], ...]]
    """The marks before a call, as alternatives. Models may omit all marks of an alternative except the last."""
    content_marks: ClassVar[tuple[str, ...]] = ()
    """Marks around the content, which are not part of it."""
    _starts: ClassVar[tuple[str, ...]]
    """The marks to search for, longest first. A mark that is a word only counts after another mark of its sequence."""
    _start: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "openings"):
            openings = cls.openings
            marks = {mark for opening in openings for mark in opening if len(opening) == 1 or not mark[0].isalnum()}
            cls._starts = tuple(sorted(marks, key=len, reverse=True))
            cls._start = re.compile("|".join(map(re.escape, cls._starts)))

    @abstractmethod
    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read the calls that follow the marks.

        Args:
            text: the text so far.
            position: position after the last mark.
            is_final: whether no more text follows.
        """

    def marked_form(self, begin: str, content: Mapping[str, Any], end: str = "", separator: str = "") -> CallForm:
        """Return the form of a call.

        Args:
            begin: text that the model writes before the content, including the marks.
            content: the format of the arguments.
            end: text after the arguments.
            separator: text between two calls.
        """
        return CallForm(tuple(mark for mark in self._starts if mark in begin), tag(begin, content, end), separator)

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls; see `ToolParser.parse`."""
        calls: list[ToolCall] = []
        before = searched = 0
        while mark := self._start.search(text, searched):
            match = self._read_behind(text, mark, is_final)
            if not calls:
                before = mark.start()
            calls += match.calls
            if match.end is None and not calls and not is_final:
                # There may be no call. White space and marks at the end of the text are certain only when more text has
                # arrived.
                return self._parsed(text[: self._shown_length(text[:before], 0)])
            if match.end is None:
                return self._parsed(text[:before].rstrip(), calls)
            searched = max(match.end, mark.end())
        if calls:
            return self._parsed(text[:before].rstrip(), calls)
        return self._parsed(text if is_final else text[: self._shown_length(text, searched)])

    def _read_behind(self, text: str, mark: re.Match[str], is_final: bool) -> CallMatch:
        """Read the calls after a mark, skipping the marks that follow it."""
        if not is_final and may_begin(text, mark.start(), self._starts):
            return CallMatch(None)  # the text may become a longer mark
        following = next(opening[opening.index(mark[0]) + 1 :] for opening in self.openings if mark[0] in opening)
        position = mark.end()
        while following:
            position = skip_space(text, position)
            found = next(
                (place for place, next_mark in enumerate(following) if text.startswith(next_mark, position)), None
            )
            if found is None:
                is_open = not is_final and may_begin(text, position, following)
                return CallMatch(None if is_open else mark.end())
            position += len(following[found])
            following = following[found + 1 :]
        return self.read(text, position, is_final)

    def _shown_length(self, text: str, searched: int) -> int:
        length = shown_length(text, self._starts + self.content_marks, searched)
        while mark := next((mark for mark in self.content_marks if text.endswith(mark, 0, length)), None):
            # a line break may follow the mark
            length = shown_length(text[: length - len(mark)], self._starts, searched)
        return length

    def _parsed(self, shown: str, calls: list[ToolCall] | None = None) -> Parsed:
        content = shown
        for mark in self.content_marks:
            content = re.sub(rf"\n?{re.escape(mark)}\n?", "", content)
        return Parsed(content, calls or [], length=len(shown))
