"""`ReasoningParser`: a pure function from the text so far to reasoning and the rest. Independent of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

SWITCHES = ("enable_thinking", "thinking")
"""Chat template variables that turn reasoning on or off."""


class TagTokenizer(Protocol):
    """The part of a tokenizer that this package needs."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""


class ReasoningState(Enum):
    """Whether an answer begins inside its reasoning."""

    INSIDE = "inside"
    """Inside the reasoning: the prompt has opened it, or the model omits the opening mark."""
    OUTSIDE = "outside"
    """After the reasoning: the prompt has closed it, so the answer has none."""
    UNDECIDED = "undecided"
    """The model decides whether to reason, by writing the opening mark or not."""


@dataclass(frozen=True, slots=True)
class Split:
    """A text, split into reasoning and the rest."""

    reasoning: str
    rest: str | None
    """Text after the reasoning; `None` while the reasoning continues. If it is empty, more of the gap may follow."""
    length: int = field(default=0, compare=False)
    """Position in the text where `reasoning` ends; set while `rest` is `None`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Positions of the reasoning in a text."""

    start: int
    """Start of the reasoning, after its opening mark."""
    stop: int | None = None
    """End of the reasoning, before the mark that ends it; `None` while there is no such mark."""
    rest: int | None = None
    """Start of the text after that mark. A mark that begins a call is part of this text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParser:
    """Separates the reasoning between two marks at the beginning of an answer."""

    begins: tuple[str, ...] = ("<think>",)
    """Spellings of the opening mark; the first one is used in prompts."""
    ends: tuple[str, ...] = ("</think>",)
    """Spellings of the closing mark. The first one can be forced; a constraint starts after it."""
    default: ReasoningState = ReasoningState.UNDECIDED
    """Initial state if the prompt does not determine it."""
    thinks_by_default: bool = True
    """Whether the model reasons by default. If False, it reasons only if a template variable of the request says so."""
    call_marks: tuple[str, ...] = ()
    """Beginnings of tool calls that also end the reasoning: some models make a call without closing it. A mark that
    starts with a line break counts only at the start of a line, so reasoning may mention it."""
    wrapper: tuple[str, str] | None = None
    """Opening and closing mark around the answer, which are not part of it."""
    gap: str = "\r\n"
    """Characters that may occur between the closing mark and the answer."""
    opening: str = "<think>\n"
    """Text that opens the reasoning, at the end of a prompt."""
    closing: str = "</think>\n\n"
    """Text that closes the reasoning, at the end of a prompt that has opened it."""
    skipping: str = ""
    """Text that makes the model skip its reasoning, at the end of a prompt that leaves the decision to the model; "" if
    the template does this in another way."""
    without_tokens: "ReasoningParser | None" = None
    """Parser for models whose tokenizer has no token for the opening mark; `None` to use this parser."""

    @property
    def end(self) -> str:
        """The closing mark that can be forced."""
        return self.ends[0]

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. They may be special tokens, which detokenization must not skip."""
        return *self.begins, *self.ends, *(self.wrapper or ())

    def for_tokenizer(self, tokenizer: TagTokenizer) -> "ReasoningParser":
        """Return the parser for a model with this tokenizer."""
        if self.without_tokens is None or tokenizer.token_id(self.begins[0]) is not None:
            return self
        return self.without_tokens

    def initial_state(self, prompt: str, continued: str = "", *, is_off: bool = False) -> ReasoningState:
        """Return the state in which the answer to a prompt begins.

        Args:
            prompt: the rendered chat template. Some templates open the reasoning, or open and close it.
            continued: text of the message that the answer continues.
            is_off: whether the template was told to turn reasoning off.
        """
        if any(end in continued for end in self.ends):
            return ReasoningState.OUTSIDE
        if any(begin in continued for begin in self.begins):
            return ReasoningState.INSIDE
        if continued:
            return ReasoningState.OUTSIDE
        prompt = prompt.rstrip()
        if prompt.endswith(self.begins):
            return ReasoningState.INSIDE
        if prompt.endswith(self.ends) or (is_off and self.default is ReasoningState.INSIDE):
            return ReasoningState.OUTSIDE
        return self.default

    def split(self, text: str, state: ReasoningState, is_final: bool, *, has_begun: bool = False) -> Split:
        """Split a partial or complete text.

        For texts `a` and `a + b`, the reasoning of `a` is a prefix of the reasoning of `a + b`. The same holds for the
        rest.
        White space around the reasoning and `gap` count as part of the marks.

        Args:
            text: the answer so far.
            state: the state at its beginning.
            is_final: whether no more text follows.
            has_begun: whether the text follows some of the reasoning, up to `Split.length`. So long reasoning need not
            be read again with every piece.
        """
        if state is not ReasoningState.OUTSIDE and not is_final and not has_begun:
            body = text.lstrip()
            if any(begin != body and begin.startswith(body) for begin in self.begins):
                return Split("", None)
        bounds = self.bounds(text, state, has_begun=has_begun)
        if bounds is None:
            return Split("", text)
        if bounds.stop is not None:
            reasoning, rest = text[bounds.start : bounds.stop].rstrip(), text[bounds.rest :]
            return Split(reasoning, rest)
        body = text[bounds.start :]
        if not is_final:
            body = body[: max(0, len(body) - self._num_held(body, has_begun=has_begun))]
        reasoning = body.rstrip()
        return Split(reasoning, "" if is_final else None, bounds.start + len(reasoning))

    def bounds(self, text: str, state: ReasoningState, *, has_begun: bool = False) -> Bounds | None:
        """Return the positions of the reasoning in a text; `None` if there is none.

        Args:
            text: the answer so far; no opening mark may begin at its end.
            state: the state at its beginning.
            has_begun: whether the text follows some of the reasoning.
        """
        start = 0
        if not has_begun:
            start = _skip_space(text, 0)
            begin = next((begin for begin in self.begins if text.startswith(begin, start)), None)
            if state is ReasoningState.OUTSIDE or (state is ReasoningState.UNDECIDED and begin is None):
                return None
            if begin is not None:
                start = _skip_space(text, start + len(begin))
        found = []
        for end in self.ends:
            if (stop := text.find(end, start)) >= 0:
                rest = stop + len(end)
                found.append((stop, len(text) - len(text[rest:].lstrip(self.gap))))
        for mark in self.call_marks:
            tag = mark.lstrip("\n")
            is_first = tag != mark and not has_begun and text.startswith(tag, start)
            at = start if is_first else text.find(mark, start)
            if at >= 0:
                at = text.index(tag, at)
                found.append((at, at))
        return Bounds(start, *min(found)) if found else Bounds(start)

    def _num_held(self, body: str, *, has_begun: bool) -> int:
        """Return the number of characters at the end of unfinished reasoning that may be the start of a mark."""
        text = body if has_begun else "\n" + body
        marks = (*self.ends, *self.call_marks)
        return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def wants_reasoning(variables: Mapping[str, Any]) -> bool | None:
    """Return whether template variables turn reasoning on or off; `None` if they do neither.

    A model knows only one of the names, so a true value takes precedence.
    """
    values = [bool(variables[name]) for name in SWITCHES if variables.get(name) is not None]
    return any(values) if values else None


def _skip_space(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip())
