"""`SpeechRules`: which tokens a model that transcribes speech may draw next, depending on what it has drawn."""

from typing import Literal, TypeAlias

import msgspec

SpeechMode: TypeAlias = Literal["text", "timestamps"]
"""What a caller asks for: text alone, or segments of text between timestamps."""


class SpeechRules(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The rules of one request, as the model's files have them.

    With timestamps, the first token is one. A timestamp ends a segment, and the next one begins another; they never
    decrease, and text is ruled out where all timestamps together are likelier than the likeliest text token.
    """

    suppressed: tuple[int, ...]
    """Never drawn."""
    suppressed_first: tuple[int, ...]
    """Not drawn as the first token."""
    end: int
    """Ends the text. Tokens before it are text; special tokens and timestamps are behind it."""
    first_timestamp: int = 0
    """The token of 0 seconds, behind all others; 0: there are no rules of timestamps."""
    max_initial_timestamp: int = -1
    """The first timestamp is at most this many steps after `first_timestamp`; -1: any."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that the rules name."""
        return (*self.suppressed, *self.suppressed_first, self.end, self.first_timestamp)
