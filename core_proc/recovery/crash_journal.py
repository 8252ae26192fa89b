"""`CrashJournal`: what a core leaves to its successor, however it dies: requests in flight, and suspects.

The journal is two files in the core's private directory. Written pages survive the death of their process, so nothing
is flushed. `crash_attribution.py` interprets the contents.
"""

import mmap
from pathlib import Path

import msgspec

from octavo.protocol.crash_bisection import BisectionState
from octavo.protocol.pulse import PulseWriter

NAME_BYTES = 16
"""Size of a request's name, which stays the same when the core restarts: a digest of the frontend's name and its
request id."""

MIN_SLOTS = 256
_SLOT_BYTES = NAME_BYTES + 1
"""A slot holds a name, and a byte that says whether the request is in flight."""


class CrashRecord(msgspec.Struct):
    """What a core knew about requests that crash cores."""

    suspicion: BisectionState[bytes] = msgspec.field(default_factory=BisectionState)
    culprits: dict[bytes, str] = {}
    """Error messages of guilty requests by name. Their frontends may not have received them yet."""


class CrashJournal:
    """The writer of the journal.

    Args:
        directory: the private directory of this core.
        pulse: tells the process that restarts the core whether there was progress, and whether suspects ran in
            isolation.
    """

    def __init__(self, directory: Path, pulse: PulseWriter) -> None:
        self._directory = directory
        self._pulse = pulse
        self._num_used = 0
        """Number of leading slots that have been used."""
        self._free: list[int] = []
        """Used slots that are free again."""
        with open(directory / "in_flight", "w+b") as file:
            file.truncate(MIN_SLOTS * _SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), MIN_SLOTS * _SLOT_BYTES)

    def add(self, name: bytes) -> int:
        """Record that this request may crash the core from now on, and return its slot."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._num_used
            self._num_used += 1
            if self._num_used * _SLOT_BYTES > len(self._memory):
                self._memory.resize(2 * len(self._memory))
        self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] = name + b"\1"
        return slot

    def name(self, slot: int) -> bytes:
        """Return the name of the request in a slot."""
        return self._memory[slot * _SLOT_BYTES : slot * _SLOT_BYTES + NAME_BYTES]

    def mark_in_flight(self, slot: int, *, is_in_flight: bool) -> None:
        """Record whether a request may crash the core, or waits without being processed."""
        self._memory[slot * _SLOT_BYTES + NAME_BYTES] = is_in_flight

    def remove(self, slot: int) -> None:
        """Record that the request in a slot has ended."""
        self.mark_in_flight(slot, is_in_flight=False)
        self._free.append(slot)

    def save(self, record: CrashRecord) -> None:
        """Replace the stored crash record. A crash meanwhile leaves the previous record."""
        path = self._directory / "suspects.new"
        path.write_bytes(msgspec.msgpack.encode(record))
        path.replace(self._directory / "suspects")

    def note_progress(self) -> None:
        """Record that a request has received a token."""
        self._pulse.note_progress()

    def note_isolation(self, *, is_isolating: bool) -> None:
        """Record whether suspects run in isolation from now on."""
        self._pulse.note_isolation(is_isolating=is_isolating)

    def close(self) -> None:
        """Unmap the file. Both files stay until their directory is removed."""
        self._memory.close()


def read_crash_record(directory: Path) -> tuple[CrashRecord, list[bytes]] | None:
    """Return a dead core's record and the requests in flight. Return None if it never accepted a request."""
    try:
        slots = (directory / "in_flight").read_bytes()
    except FileNotFoundError:
        return None  # it died before any request could reach it
    try:
        record = msgspec.msgpack.decode((directory / "suspects").read_bytes(), type=CrashRecord)
    except FileNotFoundError:
        record = CrashRecord()  # it suspected no request
    starts = [start for start in range(0, len(slots), _SLOT_BYTES) if slots[start + NAME_BYTES]]
    # A reconnecting frontend may resubmit a request before the core has noticed the loss of its connection.
    return record, list(dict.fromkeys(slots[start : start + NAME_BYTES] for start in starts))
