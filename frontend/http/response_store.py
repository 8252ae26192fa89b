"""`ResponseStore`: responses that later requests go on from, in memory or in a file. Bounded; knows no HTTP."""

import sqlite3
import time
from typing import Any

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20

_SCHEMA = """
create table if not exists responses (
    id text primary key, used real not null, size integer not null, data blob not null
)
"""


class StoredResponse(msgspec.Struct):
    """A finished response and the conversation before its output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Of the whole conversation up to the response, those of earlier responses first."""
    num_own: int
    """The last of `items`: the input of the request itself."""


class ResponseStore:
    """Keeps the most recently used responses. Several processes may share a file.

    Args:
        path: of an SQLite database; None: memory of this process.
        max_responses: most of them.
        max_bytes: of all together.

    Raises:
        sqlite3.Error: the file cannot be used.
    """

    def __init__(self, path: str | None = None, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._database = sqlite3.connect(path or ":memory:", timeout=10.0, check_same_thread=False)
        if path is not None:
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=normal")
        with self._database:
            self._database.execute(_SCHEMA)
            self._database.execute("create index if not exists by_use on responses (used)")

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, and drop those that were not used for the longest time if there are too many."""
        data = msgspec.msgpack.encode(stored)
        row = (stored.response["id"], time.time(), len(data), data)
        with self._database:
            self._database.execute("insert or replace into responses values (?, ?, ?, ?)", row)
            while self._is_full():
                self._database.execute(
                    "delete from responses where id = (select id from responses order by used limit 1)"
                )

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, None if it was never stored, or dropped."""
        found = self._database.execute("select data from responses where id = ?", (response_id,)).fetchone()
        if found is None:
            return None
        with self._database:
            self._database.execute("update responses set used = ? where id = ?", (time.time(), response_id))
        return msgspec.msgpack.decode(found[0], type=StoredResponse)

    def delete(self, response_id: str) -> bool:
        """Drop a response; False if there is none."""
        with self._database:
            return self._database.execute("delete from responses where id = ?", (response_id,)).rowcount > 0

    def _is_full(self) -> bool:
        count, size = self._database.execute("select count(*), coalesce(sum(size), 0) from responses").fetchone()
        return bool(count > self._max_responses or (size > self._max_bytes and count > 0))
