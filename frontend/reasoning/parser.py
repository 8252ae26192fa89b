"""Reasoning between think tags: a pure function from the text so far to reasoning and the rest. Keeps no state."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from octavo.protocol.errors import ConfigError


class ReasoningState(Enum):
    """Whether an answer begins inside its reasoning."""

    INSIDE = "inside"
    """Inside the reasoning: the prompt has opened it, or the model omits the opening tag."""
    OUTSIDE = "outside"
    """After the reasoning: the prompt has closed it, so there is none."""
    UNDECIDED = "unsure"
    """The model decides whether to reason, by writing the opening tag or not."""


@dataclass(frozen=True, slots=True)
class Split:
    """A text, split into reasoning and the rest."""

    reasoning: str
    rest: str | None
    """Text after the reasoning; None while the reasoning continues."""


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Splits off reasoning between two tags at the beginning of an answer."""

    begin: str
    end: str
    default: ReasoningState
    """The initial state if the prompt does not determine it."""

    @property
    def tags(self) -> tuple[str, str]:
        """Both tags. They may be special tokens, which detokenization must then not skip."""
        return self.begin, self.end

    def initial_state(self, prompt: str, continued: str = "") -> ReasoningState:
        """Return how the answer to a prompt begins.

        Args:
            prompt: the rendered chat template; some open the reasoning themselves, or close it at once.
            continued: text of the message that the answer continues.
        """
        if self.end in continued:
            return ReasoningState.OUTSIDE
        if self.begin in continued:
            return ReasoningState.INSIDE
        if continued:
            return ReasoningState.OUTSIDE
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return ReasoningState.INSIDE
        return ReasoningState.OUTSIDE if prompt.endswith(self.end) else self.default

    def split(self, text: str, state: ReasoningState, is_final: bool) -> Split:
        """Split a partial or a whole text.

        For texts `a` and `a + b`, the reasoning of `a` is a prefix of the reasoning of `a + b`, and so is the rest.
        White space around the reasoning and line breaks before the rest count as part of the tags.

        Args:
            text: the answer so far.
            state: at its beginning.
            is_final: no more text will follow.
        """
        if state is ReasoningState.OUTSIDE:
            return Split("", text)
        body = text.lstrip()
        if not is_final and len(body) < len(self.begin) and self.begin.startswith(body):
            return Split("", None)
        if body.startswith(self.begin):
            body = body[len(self.begin) :].lstrip()
        elif state is ReasoningState.UNDECIDED:
            return Split("", text)
        reasoning, tag, rest = body.partition(self.end)
        if tag:
            rest = rest.lstrip("\r\n")
            return Split(reasoning.rstrip(), rest if rest or is_final else None)
        if not is_final:
            held = next(n for n in range(len(self.end) - 1, -1, -1) if body.endswith(self.end[:n]))
            body = body[: len(body) - held]
        return Split(body.rstrip(), "" if is_final else None)


class TagTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""


def num_reasoning_tokens(
    parser: ReasoningParser, state: ReasoningState, token_ids: Sequence[int], tokenizer: TagTokenizer
) -> int:
    """Return how many of the generated tokens are reasoning, including its closing tag."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    split = parser.split(text, state, is_final=True)
    has_begun = state is ReasoningState.INSIDE or text.lstrip().startswith(parser.begin)
    if state is ReasoningState.OUTSIDE or not has_begun:
        return 0
    if parser.end not in text:
        return len(token_ids) if split.reasoning or state is ReasoningState.INSIDE else 0
    tag = tokenizer.token_id(parser.end)
    if tag is not None and tag in token_ids:
        return token_ids.index(tag) + 1
    low, high = 1, len(token_ids)  # the tag is complete after `high` tokens
    while low < high:
        middle = (low + high) // 2
        if parser.end in tokenizer.decode(token_ids[:middle], skip_special_tokens=False):
            high = middle
        else:
            low = middle + 1
    return high


_parsers = {
    "deepseek_r1": ReasoningParser("<think>", "</think>", ReasoningState.INSIDE),
    "qwen3": ReasoningParser("<think>", "</think>", ReasoningState.UNDECIDED),
}


def reasoning_parser(name: str) -> ReasoningParser:
    """Return the parser of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _parsers:
        raise ConfigError(
            f"unknown reasoning parser {name!r}",
            phase="choosing the reasoning parser",
            hint=f"--reasoning-parser is one of {', '.join(sorted(_parsers))}",
        )
    return _parsers[name]
