"""`/v1/files` and `/v1/batches`: OpenAI's client drives them; cancel, expiry, restarts, limits, errors."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_client import MODEL, FakeClient
from http_client import PLAIN, URL, application, http_on, listening, post, request
from openai.types import Batch as BatchAnswer
from openai.types import FileObject as FileAnswer
from waiting import until

from octavo.frontend.batch import service as service_module
from octavo.frontend.batch.directory import FINAL, BatchDirectory
from octavo.frontend.batch.service import MAX_ERRORS, BatchService
from octavo.frontend.http.app import create_app, make_app
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.configure import batch_service
from octavo.frontend.http.router import create_router
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "POLL_S", 0.02)


@contextlib.asynccontextmanager
async def serving(client: FakeClient, path: Path, max_bytes: int = 2**20) -> AsyncIterator[Any]:
    """Serve batches in a directory; yield the state of the application and OpenAI's client."""
    app = application(client, ["key"])
    state = app.state.octavo
    inner = make_app(state, PLAIN, ())
    service = BatchService(BatchDirectory(path, max_bytes), state.background)
    object.__setattr__(state, "batches", service)
    service.start(inner, client, 4)
    async with listening(app) as socket_path, http_on(socket_path, base_url=URL) as http:
        try:
            async with openai.AsyncOpenAI(api_key="key", base_url=f"{URL}/v1", http_client=http, max_retries=0) as api:
                yield state, api
        finally:
            state.background.abort()
            await asyncio.wait(state.background.tasks or [asyncio.create_task(asyncio.sleep(0))], timeout=30)


def lines(count: int = 3, **body: Any) -> bytes:
    entries = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": MODEL, "messages": [{"role": "user", "content": str(number)}], **body},
        }
        for number in range(count)
    ]
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


async def begin(api: Any, content: bytes, **options: Any) -> Any:
    file = await api.files.create(file=("in.jsonl", content), purpose="batch")
    return await api.batches.create(
        input_file_id=file.id, endpoint=options.pop("endpoint", CHAT), completion_window="24h", **options
    )


async def ended(api: Any, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while (found := await api.batches.retrieve(batch_id)).status not in FINAL:
            await asyncio.sleep(0.02)
    BatchAnswer.model_validate(found.model_dump())
    return found


async def results(api: Any, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await api.files.content(file_id)).text.splitlines()]


def test_openais_client_runs_a_batch(tmp_path: Path) -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        async with serving(client, tmp_path) as (_, api):
            content = lines(3) + lines(4, temperature=-1).splitlines()[3]
            batch = await begin(api, content, metadata={"a": "b"})
            assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"a": "b"}, CHAT)
            assert batch.expires_at - batch.created_at == 24 * 3600
            done = await ended(api, batch.id)
            assert done.status == "completed" and done.completed_at >= done.in_progress_at
            counts = done.request_counts
            assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
            good = await results(api, done.output_file_id)
            assert {one["custom_id"] for one in good} == {"r0", "r1", "r2"}
            assert all(
                one["response"]["status_code"] == 200
                and one["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
                for one in good
            )
            (bad,) = await results(api, done.error_file_id)
            assert (bad["custom_id"], bad["response"]["status_code"]) == ("r3", 400)
            assert "temperature" in bad["error"]["message"]
            file = await api.files.retrieve(done.output_file_id)
            FileAnswer.model_validate(file.model_dump())
            assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
            assert not list((tmp_path / "batches").glob("*.results"))

    asyncio.run(run())


def test_files_are_listed_described_and_removed(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakeClient(), tmp_path) as (_, api):
            files = [await api.files.create(file=(f"{one}.jsonl", b"x" * 9), purpose="batch") for one in range(3)]
            assert (files[0].bytes, files[0].filename, files[0].purpose) == (9, "0.jsonl", "batch")
            assert [one.id async for one in await api.files.list(limit=2)] == [one.id for one in reversed(files)]
            oldest = await api.files.list(limit=2, order="asc")
            assert [one.id for one in oldest.data] == [files[0].id, files[1].id] and oldest.has_more
            assert not (await api.files.list(purpose="batch_output")).data
            assert (await api.files.content(files[0].id)).content == b"x" * 9
            assert (await api.files.delete(files[0].id)).deleted
            for call in (api.files.retrieve, api.files.content, api.files.delete):
                with pytest.raises(openai.NotFoundError, match=files[0].id):
                    await call(files[0].id)
            soon = await api.files.create(
                file=("s.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
            )
            assert soon.expires_at == soon.created_at + 3600
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                await api.files.create(
                    file=("s.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
                )
            with pytest.raises(openai.BadRequestError, match="purpose"):
                await api.files.create(file=("s.jsonl", b"x"), purpose="assistants")
            for odd in ("../../etc/passwd", "file-..%2f..%2fx", "batch_x"):
                with pytest.raises(openai.NotFoundError):
                    await api.files.retrieve(odd)

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


def test_cancelling_keeps_the_results_so_far(tmp_path: Path) -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        async with serving(client, tmp_path) as (_, api):
            client.gate = asyncio.Event()
            batch = await begin(api, lines(6))
            waiting = await begin(api, lines(1))
            async with asyncio.timeout(60):
                while len(client.requests) < 4:
                    await asyncio.sleep(0.01)
            with pytest.raises(openai.ConflictError, match="cancel it"):
                await api.files.delete(batch.input_file_id)
            assert (await api.batches.cancel(waiting.id)).status in ("cancelling", "cancelled")
            assert (await ended(api, waiting.id)).status == "cancelled"  # although another batch has the turn
            assert (await api.batches.cancel(batch.id)).status == "cancelling"
            done = await ended(api, batch.id)
            assert (done.status, done.request_counts.total, done.output_file_id) == ("cancelled", 6, None)
            assert len(client.ended_early) == 4
            with pytest.raises(openai.ConflictError):
                await api.batches.cancel(batch.id)
            listed = await api.batches.list(limit=1)
            assert [one.id async for one in listed] == [waiting.id, batch.id]

    asyncio.run(run())


def test_a_restarted_server_goes_on(tmp_path: Path) -> None:
    """The first server ends, by an abort, with two of five requests answered; no request is answered twice."""

    async def run() -> None:
        first = FakeClient("Hello!")
        async with serving(first, tmp_path) as (state, api):
            batch = await begin(api, lines(5))
            answered: list[Any] = []
            original = service_module._BatchRun.write

            def write(self: Any, result: Any) -> None:
                original(self, result)
                answered.append(result.custom_id)
                if len(answered) == 2:
                    state.background.abort()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(service_module._BatchRun, "write", write)
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


def test_an_expired_batch_names_what_was_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.http.routes.batches.WINDOW_S", 0)

    async def run() -> None:
        async with serving(FakeClient(), tmp_path) as (_, api):
            done = await ended(api, (await begin(api, lines(2))).id)
            assert (done.status, done.request_counts.failed) == ("expired", 2)
            found = await results(api, done.error_file_id)
            assert [one["error"]["code"] for one in found] == ["batch_expired"] * 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "endpoint", "codes"),
    [
        (b"", CHAT, ["empty_file"]),
        (b"{}\n" + lines(1), CHAT, ["invalid_line"]),
        (lines(1) + lines(1), CHAT, ["invalid_line"]),
        (lines(2), "/v1/completions", ["invalid_url"] * 2),
        (b"x\n" * 200, CHAT, ["invalid_line"] * MAX_ERRORS),
    ],
    ids=["empty", "no request", "twice", "url", "many"],
)
def test_an_invalid_file_fails_as_a_whole(tmp_path: Path, content: bytes, endpoint: str, codes: list[str]) -> None:
    async def run() -> None:
        client = FakeClient()
        async with serving(client, tmp_path) as (_, api):
            done = await ended(api, (await begin(api, content, endpoint=endpoint)).id)
            assert done.status == "failed" and [one.code for one in done.errors.data] == codes
            assert not client.requests

    asyncio.run(run())


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(FakeClient(), tmp_path, max_bytes=5_000) as (_, api):
            await api.files.create(file=("a", b"x" * 4_000), purpose="batch")
            with pytest.raises(openai.ConflictError, match="--batch-dir-max-bytes"):
                await api.files.create(file=("b", b"x" * 4_000), purpose="batch")
            monkeypatch.setattr("octavo.frontend.http.routes.batches.MAX_FILE_BYTES", -(2**16) + 100)
            with pytest.raises(openai.APIStatusError) as raised:
                await api.files.create(file=("c", b"x" * 4_000), purpose="batch")
            assert raised.value.status_code == 413

    asyncio.run(run())


def test_wrong_requests_are_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakeClient(), tmp_path) as (_, api):
            with pytest.raises(openai.BadRequestError, match="endpoint"):
                await begin(api, lines(1), endpoint="/v1/models")
            with pytest.raises(openai.BadRequestError, match="input_file_id"):
                await api.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
            with pytest.raises(openai.BadRequestError, match="completion_window"):
                file = await api.files.create(file=("in.jsonl", lines(1)), purpose="batch")
                await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
            with pytest.raises(openai.NotFoundError, match="batch_none"):
                await api.batches.retrieve("batch_none")
            with pytest.raises(openai.BadRequestError, match="multipart"):
                await api.post("/files", body={"purpose": "batch"}, cast_to=object)

    asyncio.run(run())


def test_a_directory_is_for_servers_that_run_batches(tmp_path: Path) -> None:
    client: Any = FakeClient()
    config = ServerConfig(batch_dir=str(tmp_path))
    for make in (create_app, create_router):
        with pytest.raises(ConfigError, match="octavo serve"):
            make(client, config)
    with pytest.raises(ConfigError, match="--tenants"):
        batch_service(ServerConfig(batch_dir=str(tmp_path), tenants="tenants.yaml"), BackgroundTasks())
    assert batch_service(ServerConfig(), BackgroundTasks()) is None


def test_a_server_without_a_directory_names_the_flag() -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    for response in (
        post(FakeClient(), "/v1/batches", body),
        request(FakeClient(), "GET", "/v1/files"),
        request(FakeClient(), "POST", "/v1/files", b"x"),
    ):
        assert response.status_code == 404 and "--batch-dir" in response.json()["error"]["message"]
