"""Downtime, the time between two cores: its cause, its limit, and its end."""

from dataclasses import dataclass

from octavo.frontend.metrics.observer import RestartCause


@dataclass(frozen=True)
class Downtime:
    """The time between two cores."""

    cause: str
    """Why the first core is gone."""
    since_s: float
    """Monotonic time at which its loss was noticed."""
    kind: RestartCause


@dataclass(frozen=True)
class Resumption:
    """The end of a downtime: another core has taken over."""

    cause: str
    kind: RestartCause
    pause_s: float
    num_requests: int
    """Number of live requests that were submitted to the new core."""


@dataclass(frozen=True)
class ReconnectPolicy:
    """Behavior of a link after it has lost its core."""

    limit_s: float | None = 0.0
    """Seconds to wait for another core. 0: fail at once; `None`: wait until `fail` is called."""
    max_num_waiting: int = 0
    """Maximum number of new requests that wait for the next core. 0: no limit."""
