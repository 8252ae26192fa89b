"""`Offers`: the blocks that this engine keeps for others, until they are taken or nobody has come for them."""

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
    """Of what they are: engines of another one cannot use them."""
    keys: list[bytes]
    """The content of each block."""
    path: str
    """Of the files, without their ranks."""
    num_bytes: int
    """In all files together."""
    deadline_s: float
    """When they are dropped, on `time.monotonic`."""
    is_written: bool = False


class Offers:
    """All of one engine's. The step loop adds them, and the thread of `TransferServer` hands them out.

    Args:
        num_ranks: files of each offer.
        max_bytes: of all offers together.
    """

    def __init__(self, num_ranks: int, max_bytes: int) -> None:
        self.num_ranks = num_ranks
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._by_id: dict[str, Offer] = {}
        """The first has the earliest deadline."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do; None: never."""
        with self._lock:
            return next((offer.deadline_s for offer in self._by_id.values()), None)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes more may be kept."""
        self.expire()
        with self._lock:
            return self._num_bytes + num_bytes <= self._max_bytes

    def add(self, offer: Offer) -> None:
        """Keep an offer whose files are being written."""
        with self._lock:
            self._by_id[offer.transfer_id] = offer
            self._num_bytes += offer.num_bytes

    def find(self, transfer_id: str) -> Offer | None:
        """Return the offer of this name; None: there is none any more."""
        self.expire()
        with self._lock:
            return self._by_id.get(transfer_id)

    def drop(self, transfer_id: str) -> None:
        """Remove an offer and its files. One that is being written must be dropped again when it is."""
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
        """Drop what nobody has taken in time."""
        now_s = time.monotonic()
        with self._lock:
            late = [offer.transfer_id for offer in self._by_id.values() if offer.deadline_s <= now_s]
        for transfer_id in late:
            self.drop(transfer_id)
