"""The pulse: proof, in shared memory, that a core's step loop is alive.

The core writes two numbers into a small memory-mapped file in its private directory; frontends read
them without asking anyone, so `/health` tells the truth even while the core is stuck.
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<d?")
"""Monotonic seconds of the last beat; whether there was work to do."""


@dataclass(frozen=True)
class Pulse:
    """What a core last said of itself."""

    age_s: float
    """Seconds since the last beat."""
    has_work: bool
    """True when a step was in flight or planned at that beat; an idle core need not beat."""

    def is_stalled(self, deadline_s: float) -> bool:
        """True when the core had work and has not finished a step for `deadline_s` seconds."""
        return self.has_work and self.age_s > deadline_s


class PulseWriter:
    """The core's end."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.beat(has_work=False)

    def beat(self, *, has_work: bool) -> None:
        """Say "alive now"; called around every step and before every wait."""
        _LAYOUT.pack_into(self._memory, 0, time.monotonic(), has_work)

    def close(self) -> None:
        """Unmap; the file stays until its directory is removed."""
        self._memory.close()


class PulseReader:
    """A frontend's end. CLOCK_MONOTONIC is shared by all processes of one machine."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size, prot=mmap.PROT_READ)

    def read(self) -> Pulse:
        """Return the last beat."""
        last, has_work = _LAYOUT.unpack_from(self._memory, 0)
        return Pulse(age_s=max(0.0, time.monotonic() - last), has_work=has_work)

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
