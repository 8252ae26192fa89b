"""Messages between the command and its client processes: requests, client behavior, and results.

Each message is one line of JSON.
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
    """`/pooling`, for pooling models."""
    POOL = "pool"
    """`AsyncClient.pool`, in a process that has joined the engine."""


class ChaosRequest(msgspec.Struct, frozen=True):
    """One request. Its answer must not depend on anything else."""

    number: int
    kind: Kind
    body: dict[str, Any]
    """JSON body for the HTTP API. For `generate`: "prompt", "priority", "cache_salt", "request_id" and "params"; for
    `pool`: the body of `/pooling`."""

    @property
    def can_stream(self) -> bool:
        """Whether the request may be streamed. Vectors and the best of several sequences are known only at the end."""
        if self.kind in (Kind.POOLING, Kind.POOL):
            return False
        params = self.body.get("params", self.body)
        return not (params.get("best_of") or params.get("use_beam_search"))

    @property
    def is_http(self) -> bool:
        """Whether it is an HTTP request; otherwise a process that has joined the engine sends it."""
        return self.kind not in (Kind.GENERATE, Kind.POOL)


class ClientBehavior(msgspec.Struct, frozen=True):
    """How the client reads the answer, which must not depend on it."""

    is_streamed: bool = False
    pause_s: float = 0.0
    """Seconds that the reader pauses after each chunk of a stream."""
    leaves_after: int | None = None
    """Disconnect after this many chunks; `None` to read to the end."""
    aborts_after: int | None = None
    """Abort the request after this many chunks and read the rest; `None` not to abort."""


class ChaosJob(msgspec.Struct, frozen=True):
    """A request and the behavior of its client."""

    number: int
    request: ChaosRequest
    behavior: ClientBehavior = ClientBehavior()
    num_retries: int = 0
    """Number of earlier attempts that were lost because a client or server process was killed."""


class ChaosOutcome(StrEnum):
    """How a job ended."""

    ANSWERED = "answered"
    LEFT = "left"
    """The client disconnected, as planned."""
    ABORTED = "aborted"
    BROKEN = "broken"
    """The connection broke."""
    FAILED = "failed"
    """An error, a malformed answer, or no answer."""


class Result(msgspec.Struct, frozen=True):
    """The result of a job."""

    number: int
    """Number of the job."""
    outcome: ChaosOutcome
    answer: dict[str, Any] | None = None
    """The answer in the form of `answers.py`; partial if the client disconnected or aborted."""
    detail: str = ""
    """Why the job broke or failed."""
    time_s: float = 0.0
    """End of the job, on the machine's monotonic clock."""


class EngineLocation(msgspec.Struct, frozen=True):
    """The first line that a client process reads."""

    url: str
    """URL of the HTTP server, `http://HOST:PORT`; "" to join the engine instead."""
    address: str
    """Addresses of the engines, separated by commas."""
    timeout_s: float
    """Timeout in seconds for one request."""
