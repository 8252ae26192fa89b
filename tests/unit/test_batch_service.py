"""The service and the directory of batches: faults, restarts, several processes, what is removed."""

import asyncio
import io
import os
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_server import begin, ended, lines, results, serving
from counted_client import CountedClient
from fake_client import FakeClient
from http_client import URL
from waiting import until

from octavo.frontend.batch import service as service_module
from octavo.frontend.batch.batch_run import BatchRun
from octavo.frontend.batch.directory import KEPT_S, LEFTOVER_S, BatchDirectory, DirectoryFullError
from octavo.frontend.calls.services import CallServices
from octavo.frontend.http import run as run_module
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.configure import batch_service, make_app_state
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "POLL_S", 0.02)


def test_a_file_system_without_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match="Operation not permitted") as caught:
        batch_service(ServerConfig(batch_dir=str(tmp_path)), BackgroundTasks())
    assert "hard links" in caught.value.hint


def test_a_server_with_tenants_runs_their_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `octavo serve --tenants FILE --batch-dir DIRECTORY` puts its parts together."""
    monkeypatch.setattr(run_module, "limit_gc_pauses", lambda: None)  # it is for the whole process
    (tmp_path / "tenants.yaml").write_text("tenants: {a: {api_keys: [a], priority: 3}}")
    config = ServerConfig(
        tenants=str(tmp_path / "tenants.yaml"), batch_dir=str(tmp_path / "batches"), fingerprint_mode="none"
    )

    async def run() -> None:
        client: Any = CountedClient("Hello!", scheduling_policy="priority")
        calls = CallServices.open(config, client.config)
        background = BackgroundTasks()
        state = make_app_state(client, config, background=background)
        server = run_module.make_server([state], config, ["key"], calls)
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(server.config.app)) as http,
            openai.AsyncOpenAI(api_key="a", base_url=f"{URL}/v1", http_client=http, max_retries=0) as api,
        ):
            done = await ended(api, (await begin(api, lines(2))).id)
            assert done.request_counts.completed == 2 and client.priorities == [3, 3]
            totals = calls.tenants.usage.totals()["a"]
            assert (totals.num_requests, totals.num_generation_tokens, totals.num_live) == (4, 12, 0)
            with pytest.raises(openai.AuthenticationError):
                await api.with_options(api_key="b").files.list()
            background.abort()
            await asyncio.wait(background.tasks, timeout=30)
        state.responses.close()
        calls.close()

    asyncio.run(run())


def test_an_expired_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = BatchDirectory(tmp_path, 2**20)
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    with path.open("rb") as source:
        file = directory.add_file(source, 3, "x", 3600)
    assert directory.file(file.id) is not None
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    assert directory.file(file.id) is None and not directory.content_path(file.id).exists()


def test_errors_of_the_file_system_do_not_end_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, faults = BatchDirectory.unfinished, [OSError(24, "Too many open files")]

    def unfinished(self: Any, ended: set[str]) -> list[str]:
        if faults:
            raise faults.pop()
        return original(self, ended)

    monkeypatch.setattr(BatchDirectory, "unfinished", unfinished)

    async def run() -> None:
        async with serving(FakeClient("Hello!"), tmp_path) as (_, api):
            record = tmp_path / "batches" / f"batch_{'0' * 32}.json"
            record.write_text('{"batch": "of another version"}')
            await until(lambda: not faults)
            assert (await ended(api, (await begin(api, lines(1))).id)).status == "completed"
            assert len((await api.batches.list()).data) == 1

    asyncio.run(run())
    assert "Too many open files" in caplog.text and f"batch_{'0' * 32}.json is not a record" in caplog.text


def test_no_request_runs_when_its_results_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RETRY_S", 0.01)
    faults: list[OSError] = []

    async def run() -> None:
        client = FakeClient("Hello!")
        client.gate = asyncio.Event()
        original, close = BatchRun.save_progress, BatchRun.close
        num_ended = []

        async def save_progress(self: Any) -> None:
            if faults:
                raise faults.pop()
            await original(self)

        def noting_close(self: Any) -> None:
            num_ended.append(len(client.ended_early))
            close(self)

        monkeypatch.setattr(BatchRun, "save_progress", save_progress)
        monkeypatch.setattr(BatchRun, "close", noting_close)
        async with serving(client, tmp_path) as (_, api):
            batch = await begin(api, lines(3))
            await until(lambda: len(client.requests) == 3)
            faults.append(OSError(28, "No space left on device"))
            await until(lambda: bool(num_ended))
            assert num_ended == [3]
            await api.files.delete(batch.input_file_id)  # the batch has a link to its content
            client.gate.set()
            assert (await ended(api, batch.id)).request_counts.completed == 3

    asyncio.run(run())


def test_what_is_answered_while_progress_is_saved_is_saved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.gate = asyncio.Event()
        original = BatchRun.save_progress

        async def slow_save(self: Any) -> None:
            await original(self)
            if len(client.requests) >= 2 and not client.gate.is_set():
                state.background.drain()
                client.gate.set()
                await until(service._work.done)

        monkeypatch.setattr(BatchRun, "save_progress", slow_save)
        async with serving(client, tmp_path) as (state, api):
            service = state.batches
            batch = await begin(api, lines(5))
            await until(lambda: not state.background.tasks)
            done = len(client.requests)
            assert (await api.batches.retrieve(batch.id)).request_counts.completed == done >= 2

    asyncio.run(run())


def test_one_process_runs_all_batches_and_another_takes_over(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = FakeClient("Hello!"), FakeClient("Hello!")
        async with serving(second, tmp_path) as (_, other):
            async with serving(first, tmp_path) as (state, api):
                await ended(api, (await begin(api, lines(1))).id)
                leader, follower = (first, second) if first.requests else (second, first)
                await ended(other, (await begin(other, lines(1))).id)
                assert len(leader.requests) == 2 and not follower.requests
                first.gate = second.gate = asyncio.Event()
                batch = await begin(other, lines(2))
                await until(lambda: len(leader.requests) == 4)
                state.background.abort()
                first.gate.set()
            assert (await ended(other, batch.id)).request_counts.completed == 2
            assert second.requests

    asyncio.run(run())


def test_ended_batches_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(FakeClient("Hello!"), tmp_path) as (_, api):
            done = await ended(api, (await begin(api, lines(1))).id)
        directory, ids = BatchDirectory(tmp_path, 2**20), set[str]()
        assert directory.unfinished(ids) == [] and ids == {done.id}
        monkeypatch.setattr(directory, "batch", None)
        assert directory.unfinished(ids) == []

    asyncio.run(run())


def test_what_nobody_needs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(FakeClient("Hello!"), tmp_path) as (_, api):
            await ended(api, (await begin(api, lines(1))).id)

    asyncio.run(run())
    directory = BatchDirectory(tmp_path, 2**20)
    left = [tmp_path / "files" / "file-x.data", tmp_path / "files" / "file-x.a.new", tmp_path / "batches" / "b.a.new"]
    for path in left:
        path.touch()
    directory.sweep()
    assert all(path.exists() for path in left) and len(directory.batches()) == 1, "somebody may still write them"
    later = time.time() + max(LEFTOVER_S, KEPT_S) + 60
    monkeypatch.setattr(time, "time", lambda: later)
    directory.sweep()
    assert not any(path.exists() for path in left)
    assert not directory.batches() and len(directory.files()) == 2


def test_a_failed_upload_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = BatchDirectory(tmp_path, 2**20)

    def copy(source: Any, target: Any, length: int) -> None:
        target.write(b"abc")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.frontend.batch.directory.shutil.copyfileobj", copy)
    with pytest.raises(OSError, match="No space left"):
        directory.add_file(io.BytesIO(b"abcdef"), 6, "x", None)
    assert directory.num_bytes() == 0


def test_expired_files_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = BatchDirectory(tmp_path, 1000)
    directory.add_file(io.BytesIO(b"x" * 600), 600, "x", 3600)
    with pytest.raises(DirectoryFullError):
        directory.require_room(600)
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    directory.add_file(io.BytesIO(b"x" * 600), 600, "y", 3600)
    assert [one.file.filename for one in directory.files()] == ["y"]


def test_a_restarted_server_goes_on(tmp_path: Path) -> None:
    """The first server ends, by an abort, with two of five requests answered; no request is answered twice."""

    async def run() -> None:
        first = FakeClient("Hello!")
        async with serving(first, tmp_path) as (state, api):
            batch = await begin(api, lines(5))
            answered: list[Any] = []
            original = BatchRun._write

            def write(self: Any, result: Any) -> None:
                original(self, result)
                answered.append(result.custom_id)
                if len(answered) == 2:
                    state.background.abort()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BatchRun, "_write", write)
                await until(lambda: len(answered) >= 2 and not state.background.tasks)
            stopped = await api.batches.retrieve(batch.id)
            assert stopped.status == "in_progress" and 2 <= stopped.request_counts.completed < 5
        second = FakeClient("Hello!")
        async with serving(second, tmp_path) as (_, api):
            done = await ended(api, batch.id)
            assert (done.status, done.request_counts.completed) == ("completed", 5)
            found = await results(api, done.output_file_id)
            assert sorted(one["custom_id"] for one in found) == [f"r{number}" for number in range(5)]
            assert len(second.requests) == 5 - stopped.request_counts.completed

    asyncio.run(run())
