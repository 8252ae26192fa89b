"""Stop strings in a stream of text: decides which text may be returned, and when to stop.

Matches text only. Independent of tokens and requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The result for one piece of text."""

    text: str
    """Text that can be returned, because it can no longer be part of a stop string."""
    stop: str | None = None
    """The stop string that ended the output; `text` is then the last piece."""


class StopMatcher:
    """Finds stop strings in one output.

    The match that ends first wins. If several end at the same character, the first one in the list wins. Text is held
    back exactly as long as it may be the start of a stop string.

    Args:
        stops: non-empty strings.
        include_stop_string: whether to return the text up to the end of the stop string instead of up to its start.
    """

    def __init__(self, stops: Sequence[str], include_stop_string: bool = False) -> None:
        self._stops = tuple(stops)
        self._automaton = _automaton(self._stops)
        self._include = include_stop_string
        self._held = ""
        """End of the text that is held back: the possible start of a stop string."""
        self._state = 0

    def push(self, text: str, *, may_stop: bool) -> StopMatch:
        """Add the next piece of text.

        Args:
            text: the text, which may be empty.
            may_stop: whether a match may include this piece. If False, neither this piece nor the text before it can be
            part of a match (the output has not reached its `min_tokens`).
        """
        if not may_stop:
            shown = self._held + text
            self._held, self._state = "", 0
            return StopMatch(shown)
        seen = self._held + text
        for position, character in enumerate(text, start=len(self._held)):
            self._state = self._automaton.step(self._state, character)
            found = self._automaton.match[self._state]
            if found is not None:
                stop = self._stops[found]
                end = position + 1 if self._include else position + 1 - len(stop)
                self._held, self._state = "", 0
                return StopMatch(seen[:end], stop)
        shown = seen[: len(seen) - self._automaton.depth[self._state]]
        self._held = seen[len(shown) :]
        return StopMatch(shown)

    def finish(self) -> str:
        """Return the text that is still held back when the output ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """Aho-Corasick automaton (1975): one state for each prefix of a stop string.

    After each character, the state is the longest suffix of the text that is such a prefix. This is exactly the text to
    hold back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        """Transitions of each state, by the next character."""
        self.depth = [0]
        """Length of each state's prefix."""
        self.match: list[int | None] = [None]
        """Index of the first stop string that ends in each state."""
        self.shorter = [0]
        """State of the longest proper suffix of each state's prefix that is itself a prefix."""
        for place, stop in enumerate(stops):
            self._add(stop, place)
        self._link()

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while character not in self.next[state]:
            if state == 0:
                return 0
            state = self.shorter[state]
        return self.next[state][character]

    def _add(self, stop: str, place: int) -> None:
        state = 0
        for character in stop:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
                self.shorter.append(0)
            state = self.next[state][character]
        if self.match[state] is None:
            self.match[state] = place

    def _link(self) -> None:
        level = list(self.next[0].values())
        while level:
            deeper = []
            for state in level:
                shorter_match = self.match[self.shorter[state]]
                if shorter_match is not None:
                    own = self.match[state]
                    self.match[state] = shorter_match if own is None else min(own, shorter_match)
                for character, child in self.next[state].items():
                    self.shorter[child] = self.step(self.shorter[state], character)
                    deeper.append(child)
            level = deeper


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
