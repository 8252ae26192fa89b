"""Decides when a crashed process is restarted, and when to give up. Starts nothing, and reads no clock."""

from dataclasses import dataclass

MAX_RESTARTS = 8
"""Default limit of consecutive restarts without progress in between."""

LONG_LIFE_S = 60.0
"""A crash after being ready for this many seconds counts as a new failure, even if the process had no work
meanwhile."""

MAX_ISOLATED_CRASHES = 64
"""Most consecutive crashes while requests ran in isolation (`protocol/crash_bisection.py`). Each one narrows the
search, so it does not count as a failed restart. Beyond this many, the process itself must be at fault."""

FIRST_DELAY_S = 0.25
MAX_DELAY_S = 10.0


@dataclass(frozen=True)
class RestartDecision:
    """The reaction to a failure."""

    delay_s: float
    """Seconds until the next start."""
    is_hopeless: bool
    """Whether to give up."""


class RestartPolicy:
    """Counts failures since the last progress: restarts at once after the first, and with exponential backoff after
    that.

    Args:
        max_restarts: give up after this many restarts without progress.
    """

    def __init__(self, max_restarts: int = MAX_RESTARTS) -> None:
        self._max_restarts = max_restarts
        self.num_failures = 0
        """Number of failures since the last progress, not counting crashes in isolation."""
        self._num_isolated_crashes = 0
        self._first_cause = ""

    @property
    def root_cause(self) -> str:
        """Cause of the first failure since the last progress. Later ones may only be symptoms."""
        num_failures = self.num_failures + self._num_isolated_crashes
        if num_failures < 2:
            return self._first_cause
        return f"{self._first_cause} (and {num_failures - 1} restarts after it failed)"

    def fail(self, cause: str, *, is_isolated: bool = False) -> RestartDecision:
        """Count a crash, or a failed start.

        Args:
            cause: for the log and the error message.
            is_isolated: whether the process ran only requests in isolation.
        """
        if self.num_failures + self._num_isolated_crashes == 0:
            self._first_cause = cause
        if is_isolated:
            self._num_isolated_crashes += 1
            return RestartDecision(0.0, is_hopeless=self._num_isolated_crashes > MAX_ISOLATED_CRASHES)
        self.num_failures += 1
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self.num_failures - 2)) if self.num_failures > 1 else 0.0
        return RestartDecision(delay_s, is_hopeless=self.num_failures > self._max_restarts)

    def progress(self) -> None:
        """Note that the process has made progress: the next failure is a new one."""
        self.num_failures = self._num_isolated_crashes = 0
