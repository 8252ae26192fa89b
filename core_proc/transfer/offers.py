"""`Offers`: blocks that this engine keeps for other engines, until they are taken or expire."""

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from octavo.protocol.kv_transfer import rank_file


@dataclass(slots=True)
class Offer:
    """The blocks of one request."""

    transfer_id: str
    fingerprint: str
    """Digest of what determines the blocks. Engines with another fingerprint cannot use them."""
    keys: list[bytes]
    """Key of each block."""
    path: str
    """Path of the files, without the ranks."""
    num_bytes: int
    """Total size of all files."""
    deadline_s: float
    """When the offer expires, on `time.monotonic`."""
    is_written: bool = False


class Offers:
    """All offers of one engine. The step loop adds them, and the `TransferServer` thread serves them.

    Args:
        num_ranks: files of each offer.
        max_bytes: limit for all offers together.
    """

    def __init__(self, num_ranks: int, max_bytes: int) -> None:
        self.num_ranks = num_ranks
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._by_id: dict[str, Offer] = {}
        """Offers by id, the earliest deadline first."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has work to do. None if there are no offers."""
        with self._lock:
            return next((offer.deadline_s for offer in self._by_id.values()), None)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether this many more bytes may be kept."""
        self.expire()
        with self._lock:
            return self._num_bytes + num_bytes <= self._max_bytes

    def add(self, offer: Offer) -> None:
        """Add an offer whose files are being written."""
        with self._lock:
            self._by_id[offer.transfer_id] = offer
            self._num_bytes += offer.num_bytes

    def find(self, transfer_id: str) -> Offer | None:
        """Return the offer with this id. Return None if it does not exist any more."""
        self.expire()
        with self._lock:
            return self._by_id.get(transfer_id)

    def drop(self, transfer_id: str) -> None:
        """Remove an offer and its files. If it is being written, it must be dropped again afterwards."""
        with self._lock:
            offer = self._by_id.pop(transfer_id, None)
            if offer is not None:
                self._num_bytes -= offer.num_bytes
        if offer is not None:
            self.remove_files(offer.path)

    def remove_files(self, path: str) -> None:
        """Remove the files of an offer, as far as they exist."""
        for rank in range(self.num_ranks):
            with contextlib.suppress(FileNotFoundError):
                Path(rank_file(path, rank)).unlink()

    def expire(self) -> None:
        """Drop the offers that were not taken in time."""
        now_s = time.monotonic()
        with self._lock:
            late = [offer.transfer_id for offer in self._by_id.values() if offer.deadline_s <= now_s]
        for transfer_id in late:
            self.drop(transfer_id)
