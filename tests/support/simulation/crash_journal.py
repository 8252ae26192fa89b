"""The crash journal of the simulation, in memory, which survives a simulated core."""

from collections.abc import Iterable

import msgspec

from octavo.core_proc.recovery.crash_journal import CrashRecord


class SimulatedCrashJournal:
    """What a core leaves to the next; replaces `CrashJournal`."""

    def __init__(self) -> None:
        self.in_flight: dict[bytes, None] = {}
        self.record = b""
        self.has_progressed = self.is_isolating = False

    def mark_in_flight(self, name: bytes) -> None:
        """Mark a request as in flight."""
        self.in_flight[name] = None

    def clear(self, name: bytes) -> None:
        """Remove a request that is no longer in flight."""
        self.in_flight.pop(name, None)

    def mark_only(self, names: Iterable[bytes]) -> None:
        """Mark these requests as in flight, and no others."""
        self.in_flight = dict.fromkeys(names)

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
        return record, list(self.in_flight)
