"""Messages between the command and its client processes: a request, how the client behaves, and the result.

One line of JSON each.
"""

from enum import StrEnum
from typing import Any

import msgspec


class Kind(StrEnum):
    """The API that a request is sent to."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    GENERATE = "generate"
    """`AsyncClient.generate`, in a process that has joined the engine."""
    POOLING = "pooling"
    """`/pooling`, of a model that pools."""
    POOL = "pool"
    """`AsyncClient.pool`, in a process that has joined the engine."""


class ChaosRequest(msgspec.Struct, frozen=True):
    """One request. Its answer must depend on nothing else."""

    number: int
    kind: Kind
    body: dict[str, Any]
    """JSON of the HTTP API; of `generate`: "prompt", "priority", "cache_salt", "request_id" and "params"; of `pool`: as
    of `/pooling`."""

    @property
    def can_stream(self) -> bool:
        """Whether the request may be streamed: vectors and the best of several sequences are known only at the end."""
        if self.kind in (Kind.POOLING, Kind.POOL):
            return False
        params = self.body.get("params", self.body)
        return not (params.get("best_of") or params.get("use_beam_search"))

    @property
    def is_http(self) -> bool:
        """False: it is sent by a process that has joined the engine."""
        return self.kind not in (Kind.GENERATE, Kind.POOL)


class ClientBehavior(msgspec.Struct, frozen=True):
    """How the client reads the answer. The answer must not depend on it."""

    is_streamed: bool = False
    pause_s: float = 0.0
    """Pause of the reader after each chunk of a stream."""
    leaves_after: int | None = None
    """Disconnect after so many chunks; None: read to the end."""
    aborts_after: int | None = None
    """Abort the request after so many chunks and read the rest; None: do not abort."""


class ChaosJob(msgspec.Struct, frozen=True):
    """A request and the behavior of its client."""

    number: int
    request: ChaosRequest
    behavior: ClientBehavior = ClientBehavior()
    num_retries: int = 0
    """Earlier attempts, lost because a client or server process was killed."""


class ChaosOutcome(StrEnum):
    """How a job ended."""

    ANSWERED = "answered"
    LEFT = "left"
    """The client disconnected, as planned."""
    ABORTED = "aborted"
    BROKEN = "broken"
    """The connection broke."""
    FAILED = "failed"
    """An error, a malformed answer, or no answer at all."""


class Result(msgspec.Struct, frozen=True):
    """The result of a job."""

    number: int
    """Of the job."""
    outcome: ChaosOutcome
    answer: dict[str, Any] | None = None
    """In the form of `answers.py`; partial if the client left or aborted."""
    detail: str = ""
    """Why the job broke or failed."""
    time_s: float = 0.0
    """Time of the end, on the machine's monotonic clock."""


class EngineLocation(msgspec.Struct, frozen=True):
    """The first line that a client process reads."""

    url: str
    """Of the HTTP server: `http://HOST:PORT`; "": joins the engine instead."""
    address: str
    """Of the engine; of several engines, separated by commas."""
    timeout_s: float
    """Limit for one request."""
