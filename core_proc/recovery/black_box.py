"""`BlackBox`: what a core leaves to the next one, however it dies: who was exposed to it, and who is suspected.

Two files in the core's private directory. A page that was written survives its process, so nothing is flushed; what the
files mean is decided in `blame.py`. Says nothing to frontends.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path

import msgspec

from octavo.protocol.pulse import PulseWriter
from octavo.protocol.suspects import Suspicion

NAME_BYTES = 16
"""Of the name of a request that all lives of a core share: a digest of its frontend's name and its own."""

MIN_SLOTS = 256
_EMPTY = bytes(NAME_BYTES)


class Legacy(msgspec.Struct):
    """What a core knew of those that kill cores."""

    suspicion: Suspicion[bytes] = msgspec.field(default_factory=Suspicion)
    convicts: dict[bytes, str] = {}
    """Requests that were found guilty, and of what: they may not have been told."""


class BlackBox:
    """The writing end.

    Args:
        directory: of the core, and of nothing else.
        pulse: tells whoever restarts the core what it has come to.
    """

    def __init__(self, directory: Path, pulse: PulseWriter) -> None:
        self._directory = directory
        self._pulse = pulse
        self._slots: dict[bytes, int] = {}
        self._free = list(range(MIN_SLOTS))
        with open(directory / "exposed", "w+b") as file:
            file.truncate(MIN_SLOTS * NAME_BYTES)
            self._memory = mmap.mmap(file.fileno(), MIN_SLOTS * NAME_BYTES)

    def expose(self, name: bytes) -> None:
        """From now on this request may be what kills the core."""
        if name in self._slots:
            return
        if not self._free:
            num_slots = len(self._slots)
            self._memory.resize(2 * num_slots * NAME_BYTES)
            self._free.extend(range(num_slots, 2 * num_slots))
        slot = self._slots[name] = self._free.pop()
        self._memory[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = name

    def cover(self, name: bytes) -> None:
        """The request is over, or waits untouched."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._memory[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = _EMPTY
            self._free.append(slot)

    def expose_only(self, names: Iterable[bytes]) -> None:
        """Cover all others."""
        wanted = set(names)
        for name in [name for name in self._slots if name not in wanted]:
            self.cover(name)
        for name in wanted:
            self.expose(name)

    def save(self, legacy: Legacy) -> None:
        """Keep what is known of suspects; a death in between leaves what was kept before."""
        path = self._directory / "suspects.new"
        path.write_bytes(msgspec.msgpack.encode(legacy))
        path.replace(self._directory / "suspects")

    def note_progress(self) -> None:
        """A request has got a token."""
        self._pulse.note_progress()

    def note_trial(self, *, is_trying: bool) -> None:
        """Requests are tried apart from now on, or no more."""
        self._pulse.note_trial(is_trying=is_trying)

    def close(self) -> None:
        """Unmap; the files stay until their directory is removed."""
        self._memory.close()


def read_legacy(directory: Path) -> tuple[Legacy, list[bytes]] | None:
    """Return what a dead core has left: what it knew, and who was exposed when it died; None where that is nothing."""
    try:
        slots = (directory / "exposed").read_bytes()
    except FileNotFoundError:
        return None  # it died before anybody could ask anything of it
    try:
        legacy = msgspec.msgpack.decode((directory / "suspects").read_bytes(), type=Legacy)
    except FileNotFoundError:
        legacy = Legacy()  # it suspected nobody
    names = [slots[start : start + NAME_BYTES] for start in range(0, len(slots), NAME_BYTES)]
    return legacy, [name for name in names if name != _EMPTY]
