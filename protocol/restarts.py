"""How soon a process that died is started again, and when that is given up. Starts nothing, and has no clock."""

from dataclasses import dataclass

MAX_RESTARTS = 8
"""In a row, without any progress in between, unless somebody says otherwise."""

LONG_LIFE_S = 60.0
"""The death of a process that has been ready for so long is no sequel of the one before, even if nobody asked anything
of it meanwhile."""

MAX_TRIALS = 64
"""Deaths in a row at which requests were tried apart (`protocol/suspects.py`). Each tells something new, so they are no
sign that all is lost, until so many different requests have killed the process that it must be the process."""

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
        """Since the last progress, trials not included."""
        self._num_trials = 0
        self._first_cause = ""

    @property
    def root_cause(self) -> str:
        """Why the failures since the last progress began; the later ones may only be its symptoms."""
        num_failures = self.num_failures + self._num_trials
        if num_failures < 2:
            return self._first_cause
        return f"{self._first_cause} (and {num_failures - 1} restarts after it failed)"

    def fail(self, cause: str, *, is_trial: bool = False) -> Verdict:
        """The process has died, or did not start.

        Args:
            cause: in words.
            is_trial: it computed nothing but requests that were tried apart from the others.
        """
        if self.num_failures + self._num_trials == 0:
            self._first_cause = cause
        if is_trial:
            self._num_trials += 1
            return Verdict(0.0, is_hopeless=self._num_trials > MAX_TRIALS)
        self.num_failures += 1
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self.num_failures - 2)) if self.num_failures > 1 else 0.0
        return Verdict(delay_s, is_hopeless=self.num_failures > self._max_restarts)

    def progress(self) -> None:
        """The process has done some of its work: what comes now is a new failure."""
        self.num_failures = self._num_trials = 0
