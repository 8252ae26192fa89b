"""The pulse: proof, in shared memory, that a core's step loop is alive, and of what it has come to.

The core writes a few numbers into a small memory-mapped file in its private directory; frontends read
them without asking anyone, so `/health` tells the truth even while the core is stuck.

No lock is held, so whatever is read has been written by one store: `struct.pack_into` would first clear the place, and
a reader at that moment take the core for one that has not moved since the machine was started.
"""

import mmap
import time
from dataclasses import dataclass
from pathlib import Path

_SIZE = 16
"""A float of 8 bytes: monotonic seconds of the last beat, below zero where there was no work to do. Then two bytes."""

_HAS_PROGRESSED, _IS_TRYING = 8, 9
"""Whether requests have got tokens; whether requests are tried apart from the others."""


@dataclass(frozen=True)
class Pulse:
    """What a core last said of itself."""

    age_s: float
    """Seconds since the last beat."""
    has_work: bool
    """True when a step was in flight or planned at that beat; an idle core need not beat."""
    has_progressed: bool = False
    """True once any request has got a token from this core."""
    is_trying: bool = False
    """True while requests that may be what kills cores are tried, and nothing beside them."""

    def is_stalled(self, deadline_s: float) -> bool:
        """True when the core had work and has not finished a step for `deadline_s` seconds."""
        return self.has_work and self.age_s > deadline_s


class PulseWriter:
    """The core's end."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._seconds = memoryview(self._memory).cast("d")
        self.beat(has_work=False)

    def beat(self, *, has_work: bool) -> None:
        """Say "alive now"; called around every step and before every wait."""
        now = time.monotonic()
        self._seconds[0] = now if has_work else -now

    def note_progress(self) -> None:
        """A request has got a token."""
        self._memory[_HAS_PROGRESSED] = True

    def note_trial(self, *, is_trying: bool) -> None:
        """A trial begins, or all may run again."""
        self._memory[_IS_TRYING] = is_trying

    def close(self) -> None:
        """Unmap; the file stays until its directory is removed."""
        self._seconds.release()
        self._memory.close()


class PulseReader:
    """A frontend's end. CLOCK_MONOTONIC is shared by all processes of one machine."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._seconds = memoryview(self._memory).cast("d")

    def read(self) -> Pulse:
        """Return the last beat."""
        last = self._seconds[0]
        return Pulse(
            max(0.0, time.monotonic() - abs(last)),
            last > 0,
            bool(self._memory[_HAS_PROGRESSED]),
            bool(self._memory[_IS_TRYING]),
        )

    def close(self) -> None:
        """Unmap."""
        self._seconds.release()
        self._memory.close()
