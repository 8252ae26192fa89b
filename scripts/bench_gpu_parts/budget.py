"""The time of one run and its division: each section has a limit, and a minimum is reserved for later sections.

Measures no device. Skipped measurements are recorded, so that an incomplete table does not look complete.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Share:
    """The time limit of a section, in seconds."""

    most_s: float
    least_s: float
    """Seconds that earlier sections reserve for this one."""


@dataclass
class Slot:
    """The time of one section."""

    ends_at: float
    clock: Callable[[], float]
    left_out: list[str]

    def left_s(self) -> float:
        """Return the seconds left until the section has to end."""
        return max(0.0, self.ends_at - self.clock())

    def allows(self, what: str, needed_s: float) -> bool:
        """Return whether there is time for a measurement; record it as skipped if there is not."""
        left_s = self.left_s()
        if left_s < needed_s:
            self.left_out.append(f"{what}: needs {needed_s:.0f} s, and {left_s:.0f} s were left of its section")
        return left_s >= needed_s


@dataclass
class Budget:
    """The time of all sections, from now on."""

    total_s: float
    shares: Sequence[Share]
    clock: Callable[[], float] = time.monotonic
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends_at = self.clock() + self.total_s

    def slot(self, index: int) -> Slot:
        """Return the time of a section that begins now."""
        kept_s = sum(share.least_s for share in self.shares[index + 1 :])
        ends_at = min(self.clock() + self.shares[index].most_s, self._ends_at - kept_s)
        return Slot(ends_at, self.clock, self.left_out)
