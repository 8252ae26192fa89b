"""Determines whether an engine is healthy without sending it a message. `stall_watch.py` dumps the stacks."""

import time
from dataclasses import dataclass
from pathlib import Path

from octavo.frontend.link import CoreLink
from octavo.protocol.events import EngineFacts
from octavo.protocol.pulse import PulseReader

STALL_DEADLINE_S = 25.0
"""Seconds after which a core that has work but has not finished a step counts as unhealthy."""


@dataclass(frozen=True)
class Health:
    """Whether the engine is healthy, and if not, why."""

    ok: bool
    reason: str = ""
    is_stalled: bool = False
    """The engine is alive but makes no progress."""


@dataclass(frozen=True)
class EngineReport:
    """State of one of several engines."""

    index: int
    state: str
    """"starting", "up", "draining" or "down"."""
    reason: str = ""
    """Why the engine is down."""

    @property
    def ok(self) -> bool:
        """Whether the engine gets requests and answers them."""
        return self.state == "up"


def check_health(link: CoreLink, pulse: PulseReader | None, busy_since: float | None, deadline_s: float) -> Health:
    """Return whether an engine is alive and makes progress.

    Args:
        link: to its core.
        pulse: pulse of its core. `None` if the core is on another machine.
        busy_since: monotonic time since which requests have been live. `None` if there are none.
        deadline_s: seconds that the engine may have work without finishing a step or accepting a request.
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
    # The pulse of an idle core may stop, but it beats as soon as the core has received a message.
    if busy_since is not None and min(beat.age_s, time.monotonic() - busy_since) > deadline_s:
        return Health(ok=False, reason=f"the engine has not taken up a request for {beat.age_s:.0f} s", is_stalled=True)
    return Health(ok=True)


def pulse_of(facts: EngineFacts) -> PulseReader | None:
    """Return the pulse of a core on this machine. `None` for a core on another machine."""
    path = Path(facts.pulse_path)
    try:
        return PulseReader(path) if path.is_file() else None
    except FileNotFoundError:  # the core has just died; its link notices that
        return None
