"""`JoinedText`: joins the texts of windows to one text."""

import re

_TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")


class JoinedText:
    """Joins pieces of text as they arrive: one space between windows, none at the ends, and no timestamps."""

    def __init__(self) -> None:
        self._window = -1
        self._held = ""
        """White space that is appended only when more text follows."""
        self._begins_window = True
        self._has_text = False

    def add(self, window: int, piece: str) -> str:
        """Append a piece of a window; return the new part of the joined text.

        Args:
            window: index of the window; indices never decrease.
            piece: text that follows the window's earlier pieces.
        """
        if window != self._window:
            self._window, self._begins_window = window, True
            self._held = " " if self._has_text else ""
        piece = _TIMESTAMP.sub("", piece)
        if self._begins_window:
            piece = piece.lstrip()
        if not piece:
            return ""
        self._begins_window = False
        whole = self._held + piece
        shown = whole.rstrip()
        self._held = whole[len(shown) :]
        self._has_text = self._has_text or bool(shown)
        return shown
