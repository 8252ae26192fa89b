"""What one core of the simulation leaves to the next. Keeps it in memory, which here survives a core."""

from collections.abc import Iterable

import msgspec

from octavo.core_proc.recovery.black_box import Legacy


class SimulatedBox:
    """What a core leaves to the next: what `BlackBox` is in an engine."""

    def __init__(self) -> None:
        self.exposed: dict[bytes, None] = {}
        self.legacy = b""
        self.has_progressed = self.is_trying = False

    def expose(self, name: bytes) -> None:
        """Note who may be what kills the core."""
        self.exposed[name] = None

    def cover(self, name: bytes) -> None:
        """Note who cannot."""
        self.exposed.pop(name, None)

    def expose_only(self, names: Iterable[bytes]) -> None:
        """Cover all others."""
        self.exposed = dict.fromkeys(names)

    def save(self, legacy: Legacy) -> None:
        """Keep it as bytes: nothing that is changed later changes it."""
        self.legacy = msgspec.msgpack.encode(legacy)

    def note_progress(self) -> None:
        """A request has got a token."""
        self.has_progressed = True

    def note_trial(self, *, is_trying: bool) -> None:
        """A trial begins or ends."""
        self.is_trying = is_trying

    def read(self) -> tuple[Legacy, list[bytes]]:
        """Return what `read_legacy` returns in an engine."""
        legacy = msgspec.msgpack.decode(self.legacy, type=Legacy) if self.legacy else Legacy()
        return legacy, list(self.exposed)
