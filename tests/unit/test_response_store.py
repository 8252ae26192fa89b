"""The store of responses: bounds, owners that die, several processes, files of other versions."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_client import FakeClient

from octavo.frontend.http import response_store
from octavo.frontend.http.configure import make_app_state
from octavo.frontend.http.response_store import ResponseStore, StoredResponse
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError


def stored(number: int, size: int = 10) -> StoredResponse:
    return StoredResponse({"id": f"resp_{number}", "output": ["x" * size]}, [], 0)


def test_the_store_is_bounded_and_outlives_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "USE_RESOLUTION_S", 0.0)
    path = str(tmp_path / "responses.db")
    store = ResponseStore(path, max_responses=3, max_bytes=10_000)
    for number in range(3):
        store.put(stored(number))
    assert store.get("resp_0") == stored(0)  # now the latest
    store.put(stored(3))
    assert [store.get(f"resp_{number}") is not None for number in range(4)] == [True, False, True, True]
    assert ResponseStore(path).get("resp_3") == stored(3)
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
    store.put(stored(4, 9_000))
    store.put(stored(5, 9_000))
    assert store.get("resp_4") is None and store.get("resp_5") == stored(5, 9_000)
    assert not store.delete("resp_4") and store.delete("resp_5")


def test_a_response_whose_process_died_has_failed(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    dead, reader = ResponseStore(path), ResponseStore(path)
    response = {"id": "resp_1", "status": "in_progress", "output": []}
    dead.put(StoredResponse(response, [], 0, has_events=True), is_running=True)
    dead.add_events("resp_1", 0, [b"{}"])
    assert reader.is_running("resp_1")
    (lock,) = tmp_path.glob("*.lock")
    dead.close()
    lock.touch()  # as a process leaves it that was killed
    assert not reader.is_running("resp_1")
    found = reader.get("resp_1")
    assert found is not None and found.response["status"] == "failed"
    assert "send it again" in found.response["error"]["message"]
    found_events, has_more = reader.events_after("resp_1", -1)
    assert [number for number, _ in found_events] == [0, 1] and not has_more
    assert not list(tmp_path.glob("*.lock"))


def test_two_readers_of_a_dead_owner_add_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "responses.db")
    dead, first, second = (ResponseStore(path) for _ in range(3))
    dead.put(StoredResponse({"id": "resp_1", "status": "queued"}, [], 0, has_events=True), is_running=True)
    dead.close()
    is_running = first._is_running

    def is_slow(*args: Any) -> bool:
        """The second reader is done while the first one has only looked."""
        second.get("resp_1")
        return is_running(*args)

    monkeypatch.setattr(first, "_is_running", is_slow)
    assert first.get("resp_1") == second.get("resp_1")
    assert [number for number, _ in second.events_after("resp_1", -1)[0]] == [0]


def test_locks_of_dead_owners_are_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    owner = ResponseStore(path)
    owner.put(StoredResponse({"id": "resp_1"}, [], 0), is_running=True)
    left = tmp_path / "responses.db-dead.lock"
    left.touch()
    other = ResponseStore(path)
    assert not left.exists() and other.is_running("resp_1")
    owner.close()
    assert not list(tmp_path.glob("*.lock")) and not other.is_running("resp_1")


def test_a_file_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("create table responses (id text primary key, used real, size integer, data blob)")
    with pytest.raises(ConfigError, match="another version of octavo"):
        make_app_state(FakeClient(), ServerConfig(response_store=str(path)))


def test_the_totals_of_a_store_are_those_of_its_rows() -> None:
    store = ResponseStore(max_responses=3)
    for number in range(5):
        stored = StoredResponse({"id": f"resp_{number}"}, [], 0, has_events=True)
        store.put(stored, is_running=True)
        store.add_events(f"resp_{number}", 0, [b"x" * number])
        store.put(msgspec.structs.replace(stored, items=[{"a": "b"}]), first=1, events=[b"end"])
    store.delete("resp_3")
    kept = store._database.execute("select count(*), sum(size) from responses").fetchone()
    assert store._database.execute("select num_responses, size from totals").fetchone() == kept
    data = store._database.execute("select sum(length(data)) from responses").fetchone()[0]
    events = store._database.execute("select sum(length(data)) from events").fetchone()[0]
    assert kept == (2, data + events)


def test_another_process_learns_of_a_response_that_could_not_be_stored(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    owner, reader = ResponseStore(path), ResponseStore(path)
    owner.put(StoredResponse({"id": "resp_1", "status": "queued"}, [], 0), is_running=True)
    owner.mark_orphaned("resp_1")
    assert owner.has_orphans and reader.is_running("resp_1")
    assert owner.cancel_requests() == []  # what the owner does every half second
    assert not owner.has_orphans and reader.get("resp_1").response["status"] == "failed"


def test_running_responses_are_not_dropped() -> None:
    store = ResponseStore(max_responses=1)
    store.put(StoredResponse({"id": "resp_1"}, [], 0), is_running=True)
    store.put(StoredResponse({"id": "resp_2"}, [], 0))
    assert store.get("resp_1") is not None and store.get("resp_2") is None
    store.put(StoredResponse({"id": "resp_1"}, [], 0))
    store.put(StoredResponse({"id": "resp_3"}, [], 0))
    assert store.get("resp_1") is None and store.get("resp_3") is not None
