"""`PackIndex`: maps contents to pack files. Reads headers only."""

import contextlib
import logging
from pathlib import Path
from typing import NamedTuple

from octavo.protocol.block_packs import DamagedPack, PackHeader, list_packs, read_header_of
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)


class PackPlace(NamedTuple):
    """Location of a content."""

    path: Path
    header: PackHeader
    number: int
    """Index among the contents of the pack."""


class PackIndex:
    """Index of the packs in the folder of one rank.

    Other engines may add and delete packs at any time. `refresh` may find a content that is unknown here, and a known
    content may be gone. One thread may find and refresh while another adds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packs: dict[str, PackHeader] = {}
        self._places: dict[bytes, PackPlace] = {}
        self._log = LimitedLog(logger)

    def find(self, key: bytes) -> PackPlace | None:
        """Return the location of a content; `None` if it is unknown."""
        return self._places.get(key)

    def add(self, path: Path, header: PackHeader) -> None:
        """Add a pack."""
        self._packs[path.name] = header
        for index, key in enumerate(header.keys):
            self._places[key] = PackPlace(path, header, index)

    def drop(self, name: str) -> None:
        """Remove a pack that is gone."""
        if (header := self._packs.pop(name, None)) is None:
            return
        for key in header.keys:
            if (place := self._places.get(key)) is not None and place.path.name == name:
                del self._places[key]

    def refresh(self) -> None:
        """List the folder and read the headers of new packs."""
        known = set(self._packs)  # packs that are added during the listing may be missing in it
        found = dict(list_packs(self._folder))
        for name in known - found.keys():
            self.drop(name)
        for name in found.keys() - self._packs.keys():
            try:
                self.add(found[name], read_header_of(found[name]))
            except DamagedPack as error:
                self.delete(found[name], error)
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    self._log.warning("cannot read %s, a file of KV blocks: %s", found[name], error)

    def delete(self, path: Path, error: DamagedPack) -> None:
        """Delete a damaged pack, so that its contents are computed and written again."""
        self._log.warning("deleted %s, a damaged file of KV blocks: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        self.drop(path.name)
