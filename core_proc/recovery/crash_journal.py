"""`CrashJournal`: what a core leaves to its successor, however it dies: requests in flight, and suspects.

The journal is two files in the core's private directory. Written pages survive the death of their process, so nothing
is flushed. `crash_attribution.py` decides what the contents mean.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path

import msgspec

from octavo.protocol.crash_bisection import BisectionState
from octavo.protocol.pulse import PulseWriter

NAME_BYTES = 16
"""Size of a request's name that stays the same when the core restarts: a digest of the frontend's name and its id."""

MIN_SLOTS = 256
_EMPTY = bytes(NAME_BYTES)


class CrashRecord(msgspec.Struct):
    """What a core knew about requests that crash cores."""

    suspicion: BisectionState[bytes] = msgspec.field(default_factory=BisectionState)
    culprits: dict[bytes, str] = {}
    """Requests found guilty, and the error message for each: their frontends may not have received it yet."""


class CrashJournal:
    """The writing end.

    Args:
        directory: of this core alone.
        pulse: tells the process that restarts the core whether there was progress, and whether suspects ran isolated.
    """

    def __init__(self, directory: Path, pulse: PulseWriter) -> None:
        self._directory = directory
        self._pulse = pulse
        self._slots: dict[bytes, int] = {}
        self._free = list(range(MIN_SLOTS))
        with open(directory / "in_flight", "w+b") as file:
            file.truncate(MIN_SLOTS * NAME_BYTES)
            self._memory = mmap.mmap(file.fileno(), MIN_SLOTS * NAME_BYTES)

    def mark_in_flight(self, name: bytes) -> None:
        """Record that this request may be what crashes the core from now on."""
        if name in self._slots:
            return
        if not self._free:
            num_slots = len(self._slots)
            self._memory.resize(2 * num_slots * NAME_BYTES)
            self._free.extend(range(num_slots, 2 * num_slots))
        slot = self._slots[name] = self._free.pop()
        self._memory[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = name

    def clear(self, name: bytes) -> None:
        """Record that the request has ended, or waits without being touched."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._memory[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = _EMPTY
            self._free.append(slot)

    def mark_only(self, names: Iterable[bytes]) -> None:
        """Mark these requests as in flight, and clear all others."""
        wanted = set(names)
        for name in [name for name in self._slots if name not in wanted]:
            self.clear(name)
        for name in wanted:
            self.mark_in_flight(name)

    def save(self, record: CrashRecord) -> None:
        """Replace the stored crash record; a crash in between leaves the previous one."""
        path = self._directory / "suspects.new"
        path.write_bytes(msgspec.msgpack.encode(record))
        path.replace(self._directory / "suspects")

    def note_progress(self) -> None:
        """Record that a request has got a token."""
        self._pulse.note_progress()

    def note_isolation(self, *, is_isolating: bool) -> None:
        """Record whether suspects run isolated from now on."""
        self._pulse.note_isolation(is_isolating=is_isolating)

    def close(self) -> None:
        """Unmap the file; both files stay until their directory is removed."""
        self._memory.close()


def read_crash_record(directory: Path) -> tuple[CrashRecord, list[bytes]] | None:
    """Return what a dead core knew, and which requests were in flight; None if it never took a request."""
    try:
        slots = (directory / "in_flight").read_bytes()
    except FileNotFoundError:
        return None  # it died before any request could reach it
    try:
        record = msgspec.msgpack.decode((directory / "suspects").read_bytes(), type=CrashRecord)
    except FileNotFoundError:
        record = CrashRecord()  # it suspected nobody
    names = [slots[start : start + NAME_BYTES] for start in range(0, len(slots), NAME_BYTES)]
    return record, [name for name in names if name != _EMPTY]
