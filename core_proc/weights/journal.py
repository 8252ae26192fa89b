"""`WeightsJournal`: what a core leaves to its successor about its weights. Written pages survive its death."""

from pathlib import Path

import msgspec

from octavo.protocol.weights import WeightsRecord

_NAME = "weights"


class WeightsJournal:
    """A file in the private directory of a core.

    Args:
        directory: the private directory of this core.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME

    def save(self, record: WeightsRecord) -> None:
        """Replace the record. A crash meanwhile leaves the previous record."""
        path = self._path.with_suffix(".new")
        path.write_bytes(msgspec.msgpack.encode(record))
        path.replace(self._path)


def read_weights_record(directory: Path) -> WeightsRecord:
    """Return the record of a dead core. Return a new one if it left none."""
    try:
        return msgspec.msgpack.decode((directory / _NAME).read_bytes(), type=WeightsRecord)
    except FileNotFoundError:
        return WeightsRecord()
