"""What goes between the command and its client processes: a request with how it is asked, and what became of it.

Lines of JSON, one for each. Draws no request and judges no answer.
"""

from enum import StrEnum
from typing import Any

import msgspec


class Kind(StrEnum):
    """By which door a request enters the engine."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    GENERATE = "generate"
    """`AsyncClient.generate`, in a process that has joined the engine."""


class Request(msgspec.Struct, frozen=True):
    """One request; what it must be answered with follows from it alone."""

    number: int
    kind: Kind
    body: dict[str, Any]
    """JSON of the HTTP API; of `generate`: "prompt", "priority", "cache_salt", "request_id" and "params"."""

    @property
    def can_stream(self) -> bool:
        """Whether the API has a streamed answer to it: which of several are best is known at the end."""
        params = self.body.get("params", self.body)
        return not (params.get("best_of") or params.get("use_beam_search"))

    @property
    def is_of_http(self) -> bool:
        """False: it is for a process that has joined the engine."""
        return self.kind is not Kind.GENERATE


class Manner(msgspec.Struct, frozen=True):
    """How a request is asked; its answer must not depend on it."""

    is_streamed: bool = False
    pause_s: float = 0.0
    """How long the reader dawdles after each piece of a stream."""
    leaves_after: int | None = None
    """Pieces of a stream after which the caller is gone; None: it stays."""
    aborts_after: int | None = None
    """Pieces after which the caller aborts the request and stays."""


class Job(msgspec.Struct, frozen=True):
    """A request asked in one manner."""

    number: int
    request: Request
    manner: Manner = Manner()
    num_retries: int = 0
    """Times it was asked before, by processes or of processes that were killed."""


class Fate(StrEnum):
    """What became of a job."""

    ANSWERED = "answered"
    LEFT = "left"
    """The caller left, as it was told to."""
    ABORTED = "aborted"
    BROKEN = "broken"
    """The connection broke."""
    FAILED = "failed"
    """It was answered with an error, with one that no client could read, or not at all."""


class Result(msgspec.Struct, frozen=True):
    """What became of one job."""

    number: int
    """Of the job."""
    fate: Fate
    answer: dict[str, Any] | None = None
    """Of `answers.py`; of one that left or aborted: what it had by then."""
    detail: str = ""
    """Why it broke or failed."""
    time_s: float = 0.0
    """When, on the machine's monotonic clock."""


class Place(msgspec.Struct, frozen=True):
    """Where a client process finds the engine; the first line that it reads."""

    url: str
    """Of the HTTP server: `http://HOST:PORT`; "": joins the engine instead."""
    address: str
    """Of the engine."""
    timeout_s: float
    """A request that takes longer has failed."""
