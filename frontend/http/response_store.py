"""`ResponseStore`: responses that later requests go on from, in memory or in a file. Bounded; knows no HTTP.

A background response is stored before it is generated, and may have its events. The process that generates it is its
owner. If the owner dies, the next reader marks the response as failed.
"""

import contextlib
import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20

MAX_EVENTS_AT_ONCE = 256

OWNER_DIED = {"code": "server_error", "message": "the server ended before the response was complete; send it again"}

_SCHEMA = """
create table if not exists responses (
    id text primary key, used real not null, size integer not null, owner text, is_cancelled integer not null,
    data blob not null
);
create index if not exists by_use on responses (used);
create index if not exists by_owner on responses (owner) where owner is not null;
create table if not exists events (
    id text not null, sequence integer not null, data blob not null, primary key (id, sequence)
) without rowid;
"""


class StoredResponse(msgspec.Struct):
    """A response and the conversation before its output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Of the whole conversation up to the response, those of earlier responses first."""
    num_own: int
    """The last of `items`: the input of the request itself."""
    has_events: bool = False
    """Its events are stored too, so that a client can read them later."""


class ResponseStore:
    """Keeps the most recently used responses. Several processes may share a file.

    Args:
        path: of an SQLite database; None: memory of this process.
        max_responses: most of them.
        max_bytes: of all together, with their events.

    Raises:
        sqlite3.Error: the file cannot be used.
    """

    def __init__(self, path: str | None = None, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._owner = secrets.token_hex(8)
        self._path = path
        self._lock: int | None = None
        """The file whose lock tells other processes that this owner is alive."""
        if path is not None:
            _make_private(path)
        self._database = sqlite3.connect(path or ":memory:", timeout=10.0, check_same_thread=False)
        if path is not None:
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=normal")
        self._database.executescript(_SCHEMA)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may read and change it."""
        return self._path is not None

    def put(self, stored: StoredResponse, *, is_running: bool = False) -> None:
        """Keep a response, and drop those that were not used for the longest time if there are too many.

        Args:
            stored: replaces the one with the same id.
            is_running: this process still generates it, so it is not dropped.
        """
        data = msgspec.msgpack.encode(stored)
        response_id = stored.response["id"]
        if is_running:
            self._hold_lock()
        row = {
            "id": response_id,
            "used": time.time(),
            "owner": self._owner if is_running else None,
            "data": data,
        }
        with self._database:
            self._database.execute(
                "insert into responses values (:id, :used, length(:data), :owner, 0, :data) on conflict (id) do update "
                "set used = :used, size = size + length(:data) - length(data), owner = :owner, data = :data",
                row,
            )
            self._drop_oldest()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, None if it was never stored, or dropped."""
        found = self._database.execute("select data, owner from responses where id = ?", (response_id,)).fetchone()
        if found is None:
            return None
        stored = msgspec.msgpack.decode(found[0], type=StoredResponse)
        if found[1] is not None and not self._is_alive(found[1]):
            self._fail(stored)
        with self._database:
            self._database.execute("update responses set used = ? where id = ?", (time.time(), response_id))
        return stored

    def delete(self, response_id: str) -> bool:
        """Drop a response; False if there is none."""
        with self._database:
            self._database.execute("delete from events where id = ?", (response_id,))
            return self._database.execute("delete from responses where id = ?", (response_id,)).rowcount > 0

    def is_running(self, response_id: str) -> bool:
        """Return whether a process still generates a response."""
        found = self._database.execute("select owner from responses where id = ?", (response_id,)).fetchone()
        return found is not None and found[0] is not None and self._is_alive(found[0])

    def add_events(self, response_id: str, first: int, events: Sequence[bytes]) -> None:
        """Append events; `first` is the sequence number of the first one."""
        rows = [(response_id, number, event) for number, event in enumerate(events, first)]
        with self._database:
            self._database.executemany("insert into events values (?, ?, ?)", rows)
            self._database.execute(
                "update responses set size = size + ? where id = ?", (sum(map(len, events)), response_id)
            )

    def events_after(self, response_id: str, sequence: int) -> list[tuple[int, bytes]]:
        """Return the next events behind one, each with its sequence number."""
        return self._database.execute(
            "select sequence, data from events where id = ? and sequence > ? order by sequence limit ?",
            (response_id, sequence, MAX_EVENTS_AT_ONCE),
        ).fetchall()

    def request_cancel(self, response_id: str) -> None:
        """Ask the owner of a response to cancel it."""
        with self._database:
            self._database.execute("update responses set is_cancelled = 1 where id = ?", (response_id,))

    def cancel_requests(self) -> list[str]:
        """Return the responses that this process should cancel."""
        rows = self._database.execute(
            "select id from responses where owner = ? and is_cancelled = 1", (self._owner,)
        ).fetchall()
        return [row[0] for row in rows]

    def close(self) -> None:
        """Close the file. This process generates no response any more."""
        self._database.close()
        if self._lock is not None:
            os.unlink(self._lock_path(self._owner))
            os.close(self._lock)
            self._lock = None

    def _drop_oldest(self) -> None:
        while self._is_full():
            oldest = self._database.execute(
                "select id from responses where owner is null order by used limit 1"
            ).fetchone()
            if oldest is None:
                return
            self._database.execute("delete from events where id = ?", oldest)
            self._database.execute("delete from responses where id = ?", oldest)

    def _is_full(self) -> bool:
        count, size = self._database.execute("select count(*), coalesce(sum(size), 0) from responses").fetchone()
        return bool(count > self._max_responses or (size > self._max_bytes and count > 0))

    def _fail(self, stored: StoredResponse) -> None:
        """Mark a response as failed whose owner has died."""
        stored.response = {**stored.response, "status": "failed", "error": OWNER_DIED}
        if stored.has_events:
            response_id = stored.response["id"]
            last = self._database.execute("select max(sequence) from events where id = ?", (response_id,)).fetchone()[0]
            number = 0 if last is None else last + 1
            event = {"type": "response.failed", "sequence_number": number, "response": stored.response}
            with contextlib.suppress(sqlite3.IntegrityError):  # another process was faster
                self.add_events(response_id, number, [msgspec.json.encode(event)])
        self.put(stored)

    def _lock_path(self, owner: str) -> str:
        return f"{self._path}-{owner}.lock"

    def _hold_lock(self) -> None:
        """Show that this owner is alive; the kernel releases the lock when the process ends."""
        if self._path is not None and self._lock is None:
            self._lock = os.open(self._lock_path(self._owner), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _is_alive(self, owner: str) -> bool:
        if owner == self._owner:
            return True
        path = self._lock_path(owner)
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.unlink(path)
            return False
        finally:
            os.close(file)


def _make_private(path: str) -> None:
    """Make the file, if it is missing, so that only this user may read the conversations in it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise sqlite3.OperationalError(error.strerror) from None
