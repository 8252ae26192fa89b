"""The progress bar of a start."""

import io
import sys

import pytest

from octavo.frontend.load_bar import LoadBar


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def drawn(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    terminal = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with LoadBar() as bar:
        bar("loading weights", None)
        for fraction in (0.25, 0.1, 1.0):
            bar("loading weights", fraction)
        bar("profiling memory", None)
    return terminal.getvalue()


def test_a_terminal_shows_how_much_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, is_terminal=True)
    assert "loading weights: 100%" in text
    assert "profiling" not in text


def test_without_a_terminal_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, is_terminal=False) == ""
