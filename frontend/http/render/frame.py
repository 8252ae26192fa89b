"""`TextFrame`: renders chunks of a stream that differ only in their text."""

import msgspec

MARK = "\ue000the text\ue000"
"""Placeholder for the text in the chunk that a frame is made from."""

_encode = msgspec.json.Encoder().encode
_ENCODED_MARK = _encode(MARK)


class TextFrame:
    """The bytes before and after the text of a chunk.

    Args:
        chunk: JSON with `MARK` in place of the text; no client-supplied string may follow it.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: bytes) -> None:
        self._before, _, self._after = chunk.rpartition(_ENCODED_MARK)

    def wrap(self, text: str) -> bytes:
        """Return the chunk that contains this text."""
        return self._before + _encode(text) + self._after
