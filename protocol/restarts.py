"""How soon a process that died is started again, and when that is given up. Starts nothing, and has no clock."""

from dataclasses import dataclass

MAX_RESTARTS = 8
"""In a row, without any progress in between, unless somebody says otherwise."""

LONG_LIFE_S = 60.0
"""The death of a process that has been ready for so long is no sequel of the one before, even if nobody asked anything
of it meanwhile."""

FIRST_DELAY_S = 0.25
MAX_DELAY_S = 10.0


@dataclass(frozen=True)
class Verdict:
    """What to do about a failure."""

    delay_s: float
    """How long to wait before the next start."""
    is_hopeless: bool
    """True: do not start again."""


class RestartPolicy:
    """Counts the failures since the last progress: the first is answered at once, later ones after doubling delays.

    Args:
        max_restarts: after as many restarts without any progress in between no more are tried.
    """

    def __init__(self, max_restarts: int = MAX_RESTARTS) -> None:
        self._max_restarts = max_restarts
        self.num_failures = 0
        """Since the last progress."""
        self._first_cause = ""

    @property
    def root_cause(self) -> str:
        """Why the failures since the last progress began; the later ones may only be its symptoms."""
        if self.num_failures < 2:
            return self._first_cause
        return f"{self._first_cause} (and {self.num_failures - 1} restarts after it failed)"

    def fail(self, cause: str) -> Verdict:
        """The process has died, or did not start."""
        if self.num_failures == 0:
            self._first_cause = cause
        self.num_failures += 1
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self.num_failures - 2)) if self.num_failures > 1 else 0.0
        return Verdict(delay_s, is_hopeless=self.num_failures > self._max_restarts)

    def progress(self) -> None:
        """The process has done some of its work: what comes now is a new failure."""
        self.num_failures = 0
