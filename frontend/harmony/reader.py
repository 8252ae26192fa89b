"""`HarmonyReader`: splits an answer of several messages into reasoning, content and calls, in one pass."""

from collections.abc import Sequence

from octavo.frontend.harmony.header import CALL, CHANNEL, END, MARKS, MESSAGE, RETURN, START, Header, Kind, read_header
from octavo.frontend.tools.answer import AnswerDelta, CallDelta
from octavo.frontend.tools.call_id import new_call_id
from octavo.frontend.tools.json_reader import StringEscaper
from octavo.frontend.tools.parser import partial_tag

BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
"""Marks that end a message. The list is long because models forget `END`."""

SEPARATOR = "\n"
"""Text between the texts of two messages."""


class HarmonyReader:
    """Reads one answer piece by piece. The result depends only on the text, not on how it is cut.

    Args:
        functions: names of the functions that may be called.
        max_calls: number of calls after which further calls are dropped; None: no limit.
    """

    def __init__(self, functions: frozenset[str] = frozenset(), max_calls: int | None = None) -> None:
        self._functions = functions
        self._max_calls = max_calls
        self._text = ""
        """Text that is not read yet: the header of a message, or the end of its body that may begin a mark."""
        self._header: Header | None = None
        """Header of the message whose body follows; `None` if a header follows."""
        self._num_prompt_chars = 0
        """Length of the part of the header that is in the prompt."""
        self._is_bare = True
        """Whether text without a header is content: no header was read yet, or `END` preceded it."""
        self._has_reasoning = self._has_content = False
        self._has_text = False
        """Whether the body so far contains more than white space."""
        self._space = ""
        """White space at the end of the body, which counts only if text follows."""
        self._escaper = StringEscaper()
        """Escapes the arguments of a call."""
        self._is_dropped = False
        self._parts: list[AnswerDelta] = []
        """New parts, in order."""
        self.num_calls = 0
        """Number of calls that have started."""

    @classmethod
    def continuing(
        cls, prompt: str, functions: frozenset[str] = frozenset(), max_calls: int | None = None
    ) -> "HarmonyReader":
        """Return a reader for an answer that continues the last message of a prompt."""
        _, mark, message = prompt.rpartition(START)
        before = cls(functions)
        before.push(message if mark else "")
        reader = cls(functions, max_calls)
        reader._header, reader._has_text = before._header, before._has_text
        if reader._header is None:
            reader._text, reader._num_prompt_chars = before._text, len(before._text)
        return reader

    @property
    def is_reasoning(self) -> bool:
        """Whether the current message is reasoning."""
        return self._header is not None and self._header.kind is Kind.REASONING

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text, and return the new part of the answer.

        Args:
            text: the next piece of text.
            is_final: whether no more text follows.
            token_ids: ignored.
        """
        self._parts = [AnswerDelta()]
        self._text += text
        while self._take_header() if self._header is None else self._take_body(is_final):
            pass
        if is_final:
            self._finish()
        self._parts[0].further = self._parts[1:]
        return self._parts[0]

    def _take_header(self) -> bool:
        """Read the header if it is complete. Return True if there may be more to read."""
        end = self._text.find(MESSAGE)
        if end < 0:
            return False
        self._header = read_header(self._text[:end], self._functions)
        self._text = self._text[end + len(MESSAGE) :]
        self._has_text, self._space = False, ""
        if self._header.kind is Kind.CALL:
            self._begin_call(self._header.function)
        return True

    def _take_body(self, is_final: bool) -> bool:
        """Read the body as far as it has arrived. Return True if the body has ended and there may be more to read."""
        end, mark = min(((at, mark) for mark in BODY_ENDS if (at := self._text.find(mark)) >= 0), default=(-1, ""))
        if not mark:
            end = len(self._text) - (0 if is_final else partial_tag(self._text, BODY_ENDS))
        self._write(self._text[:end])
        self._text = self._text[end:]
        if not mark:
            return False
        if mark not in (START, CHANNEL):  # START and CHANNEL are part of the next header
            self._text = self._text[len(mark) :]
        self._end_body()
        self._is_bare = mark == END
        return True

    def _write(self, text: str) -> None:
        """Add text to the body."""
        assert self._header is not None
        if self._header.kind is Kind.CONTENT:
            is_further = self._has_content and not self._has_text
            self._add_content(SEPARATOR + text if text and is_further else text)
            self._has_content, self._has_text = self._has_content or bool(text), self._has_text or bool(text)
            return
        text = self._space + text if self._has_text else text.lstrip()
        settled = text.rstrip()
        self._space = text[len(settled) :]
        if not settled:
            return
        if self._header.kind is Kind.CALL:
            self._add_arguments(self._escaper.push(settled))
        else:
            is_further = self._has_reasoning and not self._has_text
            if self._parts[-1].content or self._parts[-1].calls:
                self._parts.append(AnswerDelta())
            self._parts[-1].reasoning += SEPARATOR + settled if is_further else settled
            self._has_reasoning = True
        self._has_text = True

    def _add_content(self, text: str) -> None:
        if text and self._parts[-1].calls:
            self._parts.append(AnswerDelta())
        self._parts[-1].content += text

    def _begin_call(self, function: str) -> None:
        self._escaper = StringEscaper()
        self._is_dropped = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._is_dropped:
            self._parts[-1].calls.append(CallDelta(self.num_calls, "", new_call_id(), function))
            self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if self._is_dropped:
            return
        index, calls = self.num_calls - 1, self._parts[-1].calls
        if calls and calls[-1].index == index:
            calls[-1].arguments += text
        else:
            calls.append(CallDelta(index, text))

    def _end_body(self) -> None:
        if self._header is not None and self._header.kind is Kind.CALL and not self._has_text:
            self._add_arguments("{}")
        self._header, self._num_prompt_chars = None, 0

    def _finish(self) -> None:
        """Handle the remaining text at the end: text without a header, or an incomplete header, which is dropped."""
        text, self._text = self._text[self._num_prompt_chars :], ""
        if self._header is not None:
            self._end_body()
        elif self._is_bare and text.strip() and not any(mark in text for mark in MARKS):
            self._header, self._has_text = Header(Kind.CONTENT), False
            self._write(text)
