"""The time between two cores, as a link sees it: how it began, how long one waits, how it ended."""

from dataclasses import dataclass

from octavo.frontend.metrics.observer import RestartCause


@dataclass(frozen=True)
class Outage:
    """The time between two cores."""

    cause: str
    """Why the first one is gone."""
    since_s: float
    """When that was noticed, on the monotonic clock."""
    kind: RestartCause


@dataclass(frozen=True)
class Resumption:
    """The end of an outage."""

    cause: str
    kind: RestartCause
    pause_s: float
    num_requests: int
    """Live requests that the new core was asked to go on with."""


@dataclass(frozen=True)
class Patience:
    """How a link meets the loss of its core."""

    limit_s: float | None = 0.0
    """How long to wait for another core; 0: not at all; None: until `fail` is called."""
    max_num_held: int = 0
    """New requests that may wait meanwhile; 0: no limit."""
