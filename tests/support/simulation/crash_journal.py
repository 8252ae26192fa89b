"""The crash journal of the simulation, in memory, which survives a simulated core."""

import msgspec

from octavo.core_proc.recovery.crash_journal import CrashRecord


class SimulatedCrashJournal:
    """What a core leaves to the next; replaces `CrashJournal`."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[bytes, bool]] = {}
        self._num_used = 0
        self.record = b""
        self.has_progressed = self.is_isolating = False

    @property
    def in_flight(self) -> list[bytes]:
        """The names of the requests that may be what crashes the core."""
        return list(dict.fromkeys(name for name, is_in_flight in self._slots.values() if is_in_flight))

    def add(self, name: bytes) -> int:
        """Mark a new request as in flight."""
        self._num_used += 1
        self._slots[self._num_used] = (name, True)
        return self._num_used

    def name(self, slot: int) -> bytes:
        """Return the name of a request."""
        return self._slots[slot][0]

    def mark_in_flight(self, slot: int, *, is_in_flight: bool) -> None:
        """Record whether a request is in flight."""
        self._slots[slot] = (self.name(slot), is_in_flight)

    def remove(self, slot: int) -> None:
        """Forget a request that has ended."""
        del self._slots[slot]

    def save(self, record: CrashRecord) -> None:
        """Keep the record as bytes, so later changes of the object do not affect it."""
        self.record = msgspec.msgpack.encode(record)

    def note_progress(self) -> None:
        """Record that a request has received a token."""
        self.has_progressed = True

    def note_isolation(self, *, is_isolating: bool) -> None:
        """Record that isolation begins or ends."""
        self.is_isolating = is_isolating

    def read(self) -> tuple[CrashRecord, list[bytes]]:
        """Return what `read_crash_record` returns in an engine."""
        record = msgspec.msgpack.decode(self.record, type=CrashRecord) if self.record else CrashRecord()
        return record, self.in_flight
