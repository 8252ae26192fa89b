"""`ResponseStore`: bounded storage of responses that later requests may continue, in memory or in a file. No HTTP.

A background response is stored before it is generated, and may have stored events. The process that generates it is its
owner. If the owner dies, the next reader marks the response as failed.
"""

import asyncio
import contextlib
import fcntl
import glob
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20

MAX_EVENTS_AT_ONCE = 256

USE_RESOLUTION_S = 60.0
"""Seconds within which a used response is not marked as used again, so that most reads write nothing."""

OWNER_DIED = {"code": "server_error", "message": "the server failed before the response was complete; send it again"}

_VERSION = 2
"""Version of the schema. Version 1 had no totals."""

_SCHEMA = f"""
begin immediate;
create table if not exists responses (
    id text primary key, used real not null, size integer not null, owner text, is_cancelled integer not null,
    data blob not null
);
create index if not exists by_use on responses (used);
create index if not exists by_owner on responses (owner) where owner is not null;
create table if not exists events (
    id text not null, sequence integer not null, data blob not null, primary key (id, sequence)
) without rowid;
create table if not exists totals (key integer primary key, num_responses integer not null, size integer not null);
insert or ignore into totals values (0, 0, 0);
create trigger if not exists on_insert after insert on responses begin
    update totals set num_responses = num_responses + 1, size = size + new.size;
end;
create trigger if not exists on_resize after update of size on responses begin
    update totals set size = size + new.size - old.size;
end;
create trigger if not exists on_delete after delete on responses begin
    update totals set num_responses = num_responses - 1, size = size - old.size;
end;
pragma user_version = {_VERSION};
commit;
"""
# Counting the rows at each insert would take 20 ms if the store is full.

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StoredResponse(msgspec.Struct):
    """A response, and the conversation that preceded its output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Items of the whole conversation up to the response, those of earlier responses first."""
    num_own: int
    """Number of trailing `items` that are the input of the request itself."""
    has_events: bool = False
    """Whether its events are stored too, so that a client can read them later."""
    tenant: str | None = None
    """Name of the tenant that owns the response."""


class ResponseStore:
    """Keeps the most recently used responses. Several processes may share a file. Its methods block: see `StoreThread`.

    Args:
        path: path of an SQLite database; None: keep responses in the memory of this process.
        max_responses: maximum number of responses.
        max_bytes: maximum size of all responses together, including their events.

    Raises:
        sqlite3.Error: the file cannot be used.
    """

    def __init__(self, path: str | None = None, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._owner = secrets.token_hex(8)
        self._path = path
        self._lock: int | None = None
        """The lock file that shows other processes that this owner is alive."""
        self._orphaned: set[str] = set()
        """Responses of this process that ended, but whose last state could not be written."""
        if path is not None:
            _make_private(path)
        self._database = sqlite3.connect(
            path or ":memory:", timeout=10.0, check_same_thread=False, isolation_level=None
        )
        if path is not None:
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=normal")
            self._check_version()
            self._remove_locks_of_dead_owners(path)
        self._database.executescript(_SCHEMA)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may read and change the store."""
        return self._path is not None

    @property
    def has_orphans(self) -> bool:
        """Whether a response passed to `mark_orphaned` is not marked as failed yet."""
        return bool(self._orphaned)

    def put(
        self, stored: StoredResponse, *, is_running: bool = False, first: int = 0, events: Sequence[bytes] = ()
    ) -> None:
        """Store a response. If there are too many, drop the least recently used ones.

        Args:
            stored: the response; it replaces one with the same id.
            is_running: whether this process still generates it; if so, it is not dropped.
            first: the sequence number of the first of `events`.
            events: appended to the events of the response.
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
        with self._writing():
            self._database.execute(
                "insert into responses values (:id, :used, length(:data), :owner, 0, :data) on conflict (id) do update "
                "set used = :used, size = size + length(:data) - length(data), owner = :owner, data = :data",
                row,
            )
            self._append(response_id, first, events)
            self._drop_oldest()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; `None` if it was never stored or has been dropped."""
        found = self._row(response_id)
        if found is None:
            return None
        owner, used, data = found
        if owner is not None and not self._is_running(response_id, owner):
            with self._writing():
                stored = self._fail(response_id)
            self._orphaned.discard(response_id)
            return stored
        if time.time() - used >= USE_RESOLUTION_S:
            with self._writing():
                self._database.execute("update responses set used = ? where id = ?", (time.time(), response_id))
        return msgspec.msgpack.decode(data, type=StoredResponse)

    def delete(self, response_id: str) -> bool:
        """Drop a response; return False if there is none."""
        with self._writing():
            return self._delete(response_id)

    def is_running(self, response_id: str) -> bool:
        """Return whether a process still generates a response."""
        found = self._row(response_id)
        return found is not None and self._is_running(response_id, found[0])

    def add_events(self, response_id: str, first: int, events: Sequence[bytes]) -> None:
        """Append events; `first` is the sequence number of the first one."""
        with self._writing():
            self._append(response_id, first, events)

    def events_after(self, response_id: str, sequence: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Return the next events after a sequence number, each with its own number, and whether more may follow."""
        is_running = self.is_running(response_id)  # read before the events, so none is missed
        if not is_running:
            self.get(response_id)  # ends the events of a response whose process has died
        found = self._database.execute(
            "select sequence, data from events where id = ? and sequence > ? order by sequence limit ?",
            (response_id, sequence, MAX_EVENTS_AT_ONCE),
        ).fetchall()
        return found, is_running or len(found) == MAX_EVENTS_AT_ONCE

    def request_cancel(self, response_id: str) -> None:
        """Ask the owner of a response to cancel it."""
        with self._writing():
            self._database.execute("update responses set is_cancelled = 1 where id = ?", (response_id,))

    def cancel_requests(self) -> list[str]:
        """Return the responses that this process should cancel. Mark orphaned responses as failed."""
        for response_id in list(self._orphaned):
            if self.get(response_id) is None:  # it was dropped
                self._orphaned.discard(response_id)
        rows = self._database.execute(
            "select id from responses where owner = ? and is_cancelled = 1", (self._owner,)
        ).fetchall()
        return [row[0] for row in rows]

    def mark_orphaned(self, response_id: str) -> None:
        """Treat a response of this process as if its owner had died. Writes nothing: writing may have failed."""
        self._orphaned.add(response_id)

    def close(self) -> None:
        """Close the file. This process must not generate a response any more."""
        self._database.close()
        if self._path is not None and self._lock is not None:
            os.unlink(_lock_path(self._path, self._owner))
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction during which no other process writes."""
        self._database.execute("begin immediate")
        with self._database:
            yield

    def _row(self, response_id: str) -> tuple[str | None, float, bytes] | None:
        selected = self._database.execute("select owner, used, data from responses where id = ?", (response_id,))
        row: tuple[str | None, float, bytes] | None = selected.fetchone()
        return row

    def _append(self, response_id: str, first: int, events: Sequence[bytes]) -> None:
        rows = [(response_id, number, event) for number, event in enumerate(events, first)]
        self._database.executemany("insert into events values (?, ?, ?)", rows)
        self._database.execute(
            "update responses set size = size + ? where id = ?", (sum(map(len, events)), response_id)
        )

    def _delete(self, response_id: str) -> bool:
        self._database.execute("delete from events where id = ?", (response_id,))
        return self._database.execute("delete from responses where id = ?", (response_id,)).rowcount > 0

    def _drop_oldest(self) -> None:
        while True:
            count, size = self._database.execute("select num_responses, size from totals").fetchone()
            if count <= self._max_responses and size <= self._max_bytes:
                return
            oldest = self._database.execute(
                "select id from responses where owner is null order by used limit 1"
            ).fetchone()
            if oldest is None:
                return
            self._delete(oldest[0])

    def _fail(self, response_id: str) -> StoredResponse | None:
        """Mark a response whose owner has died as failed, unless another process was faster."""
        if (found := self._row(response_id)) is None:
            return None
        owner, _, data = found
        stored = msgspec.msgpack.decode(data, type=StoredResponse)
        if owner is not None:
            stored.response = {**stored.response, "status": "failed", "error": OWNER_DIED}
            if stored.has_events:
                self._append_failure(stored)
            data = msgspec.msgpack.encode(stored)
            self._database.execute(
                "update responses set owner = null, size = size + length(:data) - length(data), data = :data "
                "where id = :id",
                {"id": response_id, "data": data},
            )
        return stored

    def _append_failure(self, stored: StoredResponse) -> None:
        response_id = stored.response["id"]
        last = self._database.execute("select max(sequence) from events where id = ?", (response_id,)).fetchone()[0]
        number = 0 if last is None else last + 1
        event = {"type": "response.failed", "sequence_number": number, "response": stored.response}
        self._append(response_id, number, [msgspec.json.encode(event)])

    def _check_version(self) -> None:
        """Reject a file of another version.

        Raises:
            sqlite3.DatabaseError: the file has another version.
        """
        (version,) = self._database.execute("pragma user_version").fetchone()
        has_tables = self._database.execute("select 1 from sqlite_schema limit 1").fetchone() is not None
        if has_tables and version != _VERSION:
            self._database.close()
            raise sqlite3.DatabaseError(
                f"another version of octavo, or another program, made this database (its user_version is {version}, "
                f"not {_VERSION}): remove it or name another file"
            )

    def _hold_lock(self) -> None:
        """Lock a file to show that this owner is alive. The kernel releases the lock when the process ends."""
        while self._path is not None and self._lock is None:
            file = os.open(_lock_path(self._path, self._owner), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink > 0:
                self._lock = file
            else:  # another process removed it before it was locked
                os.close(file)

    def _is_running(self, response_id: str, owner: str | None) -> bool:
        if owner == self._owner:
            return response_id not in self._orphaned
        return owner is not None and self._path is not None and not _remove_if_unlocked(_lock_path(self._path, owner))

    def _remove_locks_of_dead_owners(self, path: str) -> None:
        for lock in glob.glob(_lock_path(glob.escape(path), "*")):
            _remove_if_unlocked(lock)


class StoreThread:
    """Calls the methods of a store in its own thread, in order: a slow disk does not block the event loop.

    Args:
        store: the store; only this thread may use it from now on.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "response-store")

    @property
    def is_shared(self) -> bool:
        """Whether other processes may read and change the store."""
        return self._store.is_shared

    @property
    def has_orphans(self) -> bool:
        """Whether a response that ended in this process is not marked as ended yet."""
        return self._store.has_orphans

    async def run(
        self, method: Callable[Concatenate[ResponseStore, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Call a method of the store. The method completes even if the caller is cancelled.

        Raises:
            sqlite3.Error: the file cannot be read or written.
        """
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(method, self._store, *args, **kwargs)))

    def close(self) -> None:
        """Close the store. Blocks until earlier calls have completed."""
        self._thread.submit(self._store.close).result()
        self._thread.shutdown()


def _lock_path(path: str, owner: str) -> str:
    return f"{path}-{owner}.lock"


def _remove_if_unlocked(path: str) -> bool:
    """Remove the lock file of an owner; return whether the owner is dead."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(path)
        return True
    finally:
        os.close(file)


def _make_private(path: str) -> None:
    """Create the file if it is missing, so that only this user can read the conversations in it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise sqlite3.OperationalError(error.strerror) from None
