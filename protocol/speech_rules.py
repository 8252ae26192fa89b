"""`SpeechRules`: which tokens a speech-to-text model may generate next, depending on its previous tokens."""

from typing import Literal, TypeAlias

import msgspec

SpeechMode: TypeAlias = Literal["text", "timestamps"]
"""What a caller requests: text alone, or segments of text between timestamps."""


class SpeechRules(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The rules of one request, according to the model's files.

    With timestamps, the first token is a timestamp. A timestamp ends a segment, and the next one begins another.
    Timestamps never decrease. Text is excluded if all timestamps together are more likely than the most likely text
    token.
    """

    suppressed: tuple[int, ...]
    """Tokens that are never generated."""
    suppressed_first: tuple[int, ...]
    """Tokens that are not generated first."""
    end: int
    """The token that ends the text. Lower ids are text; higher ids are special tokens and timestamps."""
    first_timestamp: int = 0
    """The token of 0 seconds, the lowest timestamp id; 0 if there are no timestamp rules."""
    max_initial_timestamp: int = -1
    """The first timestamp is at most this many steps after `first_timestamp`; -1 for no limit."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids in the rules."""
        return (*self.suppressed, *self.suppressed_first, self.end, self.first_timestamp)
