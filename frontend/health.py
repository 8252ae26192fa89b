"""Whether an engine is healthy, found out without sending it a message. Dumps no stacks: `stall_watch.py` does."""

import time
from dataclasses import dataclass
from pathlib import Path

from octavo.frontend.link import CoreLink
from octavo.protocol.events import EngineFacts
from octavo.protocol.pulse import PulseReader

STALL_DEADLINE_S = 25.0
"""A core that has work and has not finished a step for this long is not healthy."""


@dataclass(frozen=True)
class Health:
    """Whether the engine is healthy, and if not, why."""

    ok: bool
    reason: str = ""
    is_stalled: bool = False
    """It is alive but makes no progress."""


@dataclass(frozen=True)
class EngineReport:
    """How one of several engines is."""

    index: int
    state: str
    """starting, up, draining or down."""
    reason: str = ""
    """Why it is down."""

    @property
    def ok(self) -> bool:
        """True for an engine that gets requests and answers them."""
        return self.state == "up"


def check_health(link: CoreLink, pulse: PulseReader | None, busy_since: float | None, deadline_s: float) -> Health:
    """Return whether an engine is alive and makes progress.

    Args:
        link: to its core.
        pulse: of its core; None if the core is on another machine.
        busy_since: since when there have been live requests, on the monotonic clock; None: there are none.
        deadline_s: how long it may have work without finishing a step or taking up a request.
    """
    if link.failure:
        return Health(ok=False, reason=str(link.failure))
    if downtime := link.downtime:
        return Health(ok=False, reason=f"the engine is restarting: {downtime.cause}")
    if pulse is None:
        return Health(ok=True)
    beat = pulse.read()
    if beat.is_stalled(deadline_s):
        return Health(ok=False, reason=f"the engine has not finished a step for {beat.age_s:.0f} s", is_stalled=True)
    # An idle core need not beat, but one that has received a message beats at once.
    if busy_since is not None and min(beat.age_s, time.monotonic() - busy_since) > deadline_s:
        return Health(ok=False, reason=f"the engine has not taken up a request for {beat.age_s:.0f} s", is_stalled=True)
    return Health(ok=True)


def pulse_of(facts: EngineFacts) -> PulseReader | None:
    """Return the pulse of a core on this machine, None for one on another machine."""
    path = Path(facts.pulse_path)
    try:
        return PulseReader(path) if path.is_file() else None
    except FileNotFoundError:  # the core has just died, which will be noticed elsewhere
        return None
