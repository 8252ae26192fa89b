"""Stop strings in a stream: the same result as on the whole text, and text is held back only as long as necessary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.text.stop_strings import StopMatcher

stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4)
texts = st.lists(st.text(alphabet="abc", max_size=5), max_size=12)


def reference(text: str, stops: list[str], start: int, *, include: bool) -> tuple[str, str | None]:
    """Look at the whole text: the earliest end wins, then the list's order. Matches lie after `start`."""
    for end in range(start, len(text) + 1):
        for stop in stops:
            if text[start:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def longest_held(text: str, stops: list[str]) -> int:
    """Characters at the end of `text` that could be the start of a stop string."""
    return max((length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])), default=0)


@given(stops=stop_lists, pieces=texts, first=st.integers(0, 12), include=st.booleans())
def test_pieces_give_what_the_whole_text_gives(stops: list[str], pieces: list[str], first: int, include: bool) -> None:
    matcher = StopMatcher(stops, include_stop_string=include)
    shown, found = "", None
    for place, piece in enumerate(pieces):
        match = matcher.push(piece, may_stop=place >= first)
        shown += match.text
        seen = "".join(pieces[: place + 1])
        if match.stop is not None:
            found = match.stop
            break
        searched = "".join(pieces[first : place + 1])
        assert shown == seen[: len(seen) - longest_held(searched, stops)]
    else:
        shown += matcher.finish()
    start = len("".join(pieces[:first]))
    assert (shown, found) == reference("".join(pieces), stops, start, include=include)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stop"),
    [
        (["STOP"], "a STOP b", "a ", "STOP"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["b", "ab"], "xab", "xa", "b"),
        (["ab", "b"], "xab", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["\U0001f600"], "x\U0001f600y", "x", "\U0001f600"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_examples_at_every_cut(stops: list[str], text: str, shown: str, stop: str, size: int) -> None:
    matcher = StopMatcher(stops)
    result = ""
    for start in range(0, len(text), size):
        match = matcher.push(text[start : start + size], may_stop=True)
        result += match.text
        if match.stop is not None:
            break
    assert (result, match.stop) == (shown, stop)


def test_text_before_min_tokens_never_matches_nor_is_held() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab a", may_stop=False).text == "ab a"
    match = matcher.push("b ab", may_stop=True)
    assert (match.text, match.stop) == ("b ", "ab")


def test_held_text_is_released_when_matching_ends() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab", may_stop=True).text == "x"
    assert matcher.push("", may_stop=False).text == "ab"
    assert matcher.push("ab", may_stop=True).text == ""
    assert matcher.finish() == "ab"
    assert matcher.finish() == ""


def test_many_long_stops_cost_a_step_per_character() -> None:
    stops = ["a" * length + "b" for length in range(1, 65)]
    matcher = StopMatcher(stops)
    assert len(matcher._automaton.next) == 1 + 64 + 64
    assert matcher.push("a" * 1000, may_stop=True).text == "a" * (1000 - 64)
    assert matcher.push("b", may_stop=True).stop == "a" * 1 + "b"
