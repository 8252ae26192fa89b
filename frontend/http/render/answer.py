"""What all answers of one HTTP request have in common, whole or streamed."""

from dataclasses import dataclass

from octavo.frontend.http.render.logprobs import TokenNames


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
    has_token_ids: bool = False
    has_usage: bool = False
    """In streams: a last chunk with the usage."""
    has_running_usage: bool = False
    """In streams: the usage so far in every chunk."""
