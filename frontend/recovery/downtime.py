"""Downtime, the time between two cores: its cause, its limit, and how it ended."""

from dataclasses import dataclass

from octavo.frontend.metrics.observer import RestartCause


@dataclass(frozen=True)
class Downtime:
    """The time between two cores."""

    cause: str
    """Why the first one is gone."""
    since_s: float
    """When that was noticed, on the monotonic clock."""
    kind: RestartCause


@dataclass(frozen=True)
class Resumption:
    """The end of a downtime: another core has taken over."""

    cause: str
    kind: RestartCause
    pause_s: float
    num_requests: int
    """Live requests that were submitted to the new core."""


@dataclass(frozen=True)
class ReconnectPolicy:
    """What a link does when it loses its core."""

    limit_s: float | None = 0.0
    """How long to wait for another core; 0: fail at once; None: wait until `fail` is called."""
    max_num_waiting: int = 0
    """New requests that may wait for the next core; 0: no limit."""
