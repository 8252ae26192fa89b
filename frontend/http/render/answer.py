"""What all answers of one HTTP request have in common, whole or streamed."""

from dataclasses import dataclass

from octavo.frontend.http.render.logprobs import TokenNames
from octavo.frontend.http.render.reading import Reading


@dataclass(slots=True)
class AnswerStyle:
    """Identity of an answer, and what the caller wants to see in it."""

    id: str
    """`chatcmpl-...` or `cmpl-...`."""
    created: int
    """Seconds since the epoch."""
    model: str
    names: TokenNames
    num_logprobs: int | None = None
    """None: the caller wants none."""
    echo: str | None = None
    """Chat: text to lead the answer with."""
    reading: Reading | None = None
    """Chat: how the text is read; None: all of it is content."""
    has_token_ids: bool = False
    has_usage: bool = False
    """In streams: a last chunk with the usage."""
    has_running_usage: bool = False
    """In streams: the usage so far in every chunk."""
