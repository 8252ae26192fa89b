"""The pulse: proof, in shared memory, that a core's step loop is alive, and of what it has come to.

The core writes a few numbers into a small memory-mapped file in its private directory; frontends read
them without asking anyone, so `/health` tells the truth even while the core is stuck.
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<d?")
"""Monotonic seconds of the last beat; whether there was work to do."""

_ACHIEVEMENT = struct.Struct("<??")
"""Behind it: whether requests have got tokens; whether requests are tried apart from the others."""

_SIZE = _LAYOUT.size + _ACHIEVEMENT.size


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
        self._has_progressed = self._is_trying = False
        self.beat(has_work=False)

    def beat(self, *, has_work: bool) -> None:
        """Say "alive now"; called around every step and before every wait."""
        _LAYOUT.pack_into(self._memory, 0, time.monotonic(), has_work)

    def note_progress(self) -> None:
        """A request has got a token."""
        if not self._has_progressed:
            self._has_progressed = True
            self._note()

    def note_trial(self, *, is_trying: bool) -> None:
        """A trial begins, or all may run again."""
        self._is_trying = is_trying
        self._note()

    def _note(self) -> None:
        _ACHIEVEMENT.pack_into(self._memory, _LAYOUT.size, self._has_progressed, self._is_trying)

    def close(self) -> None:
        """Unmap; the file stays until its directory is removed."""
        self._memory.close()


class PulseReader:
    """A frontend's end. CLOCK_MONOTONIC is shared by all processes of one machine."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)

    def read(self) -> Pulse:
        """Return the last beat."""
        last, has_work = _LAYOUT.unpack_from(self._memory, 0)
        has_progressed, is_trying = _ACHIEVEMENT.unpack_from(self._memory, _LAYOUT.size)
        return Pulse(max(0.0, time.monotonic() - last), has_work, has_progressed, is_trying)

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
