"""The pulse: a heartbeat of the core's step loop in shared memory.

The core writes a few numbers into a small memory-mapped file in its private directory. Frontends read them without
asking the core, so `/health` is correct even while the core hangs.

There is no lock, so every value is written by a single store. `struct.pack_into` would clear the value first, and a
reader at that moment would see a core that has not beaten since the machine was booted.
"""

import mmap
import time
from dataclasses import dataclass
from pathlib import Path

_SIZE = 16
"""8-byte float: monotonic seconds of the last beat, negative if the core was idle. Then two flags."""

_HAS_PROGRESSED, _IS_ISOLATING = 8, 9
"""Offsets: whether any request has received a token; whether requests run in isolation."""


@dataclass(frozen=True)
class Pulse:
    """The last beat of a core."""

    age_s: float
    """Seconds since the last beat."""
    has_work: bool
    """Whether a step was in flight or planned at that beat. An idle core does not beat."""
    has_progressed: bool = False
    """True once any request has received a token from this core."""
    is_isolating: bool = False
    """True while requests that may have crashed a core run in isolation."""

    def is_stalled(self, deadline_s: float) -> bool:
        """Return whether the core had work and has not finished a step for `deadline_s` seconds."""
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
        """Record that the loop is alive now. Called around every step and before every wait."""
        now = time.monotonic()
        self._seconds[0] = now if has_work else -now

    def note_progress(self) -> None:
        """Record that a request has received a token."""
        self._memory[_HAS_PROGRESSED] = True

    def note_isolation(self, *, is_isolating: bool) -> None:
        """Record whether requests run in isolation from now on."""
        self._memory[_IS_ISOLATING] = is_isolating

    def close(self) -> None:
        """Unmap the file, which stays until its directory is removed."""
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
            bool(self._memory[_IS_ISOLATING]),
        )

    def close(self) -> None:
        """Unmap."""
        self._seconds.release()
        self._memory.close()
