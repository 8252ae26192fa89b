"""`/v1/files` and `/v1/batches`: OpenAI's client drives them; cancel, expiry, restarts, limits, errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_server import CHAT, begin, ended, lines, results, serving
from counted_client import CountedClient
from fake_client import MODEL, FakeClient
from http_client import URL, post, request
from openai.types import FileObject as FileAnswer

from octavo.frontend.batch import service as service_module
from octavo.frontend.batch.batch_run import MAX_ERRORS
from octavo.frontend.http.app import create_app
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.configure import batch_service
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.router import create_router
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "POLL_S", 0.02)


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
            usage = [one["response"]["body"]["usage"] for one in good]
            assert done.usage.input_tokens == sum(one["prompt_tokens"] for one in usage) > 0
            assert done.usage.output_tokens == sum(one["completion_tokens"] for one in usage) > 0
            assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
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
            await api.files.delete(batch.input_file_id)  # the batch goes on
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
        (lines(1, background=True), CHAT, ["invalid_line"]),
        (lines(1, stream=True), CHAT, ["invalid_line"]),
    ],
    ids=["empty", "no request", "twice", "url", "many", "background", "stream"],
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
            with pytest.MonkeyPatch.context() as patch:  # by its headers alone
                patch.setattr(ApiRequest, "form", None)
                with pytest.raises(openai.ConflictError, match="--batch-dir-max-bytes"):
                    await api.files.create(file=("b", b"x" * 90_000), purpose="batch")
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


TENANTS = """
tenants:
  slow: {api_keys: [slow], requests_per_minute: 4}
  narrow: {api_keys: [narrow], max_concurrent_requests: 1}
"""


def with_tenants(path: Path) -> ServerConfig:
    (path / "tenants.yaml").write_text(TENANTS)
    return ServerConfig(tenants=str(path / "tenants.yaml"), fingerprint_mode="none")


def test_a_tenant_does_not_find_the_files_and_batches_of_others(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakeClient("Hello!"), tmp_path, config=with_tenants(tmp_path)) as (_, api):
            owner, other = api.with_options(api_key="narrow"), api.with_options(api_key="slow")
            batch = await begin(owner, lines(1))
            done = await ended(owner, batch.id)
            for file_id in (batch.input_file_id, done.output_file_id):
                for call in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(openai.NotFoundError, match=file_id):
                        await call(file_id)
            for call in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError, match=batch.id):
                    await call(batch.id)
            with pytest.raises(openai.BadRequestError, match="input_file_id"):
                await other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
            assert not (await other.files.list()).data and not (await other.batches.list()).data
            for seer in (owner, api):  # keys of --api-key find all
                assert len((await seer.files.list()).data) == 2 and len((await seer.batches.list()).data) == 1
                assert len(await results(seer, done.output_file_id)) == 1

    asyncio.run(run())


def test_the_limits_of_a_tenant_hold_for_its_batches(tmp_path: Path) -> None:
    async def run() -> None:
        client = CountedClient("Hello!")
        async with serving(client, tmp_path, config=with_tenants(tmp_path)) as (state, api):
            state.calls.tenants.usage._clock = lambda: 1000.0  # budgets do not refill
            slow, narrow = api.with_options(api_key="slow"), api.with_options(api_key="narrow")
            limited = await begin(slow, lines(5))  # this takes two of the four requests
            done = await ended(narrow, (await begin(narrow, lines(3))).id)  # the next one need not wait
            assert done.request_counts.completed == 3
            async with asyncio.timeout(60):
                while (found := await slow.batches.retrieve(limited.id)).request_counts.completed < 2:
                    await asyncio.sleep(0.01)
            assert found.status == "in_progress" and found.request_counts.completed == 2
            await slow.batches.cancel(limited.id)
            assert (await ended(slow, limited.id)).request_counts.completed == 2
            totals = state.calls.tenants.usage.totals()
            assert (totals["slow"].num_requests, totals["narrow"].num_requests) == (4, 5)
            assert (totals["slow"].num_generation_tokens, totals["narrow"].num_generation_tokens) == (12, 18)
            for one in totals.values():
                assert one.num_live == 0 and not any(one.num_rejected.values())

    asyncio.run(run())


def test_responses_of_a_batch_are_not_stored_unless_it_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakeClient("Hello!"), tmp_path) as (_, api):
            bodies = [{"model": MODEL, "input": "hi"}, {"model": MODEL, "input": "hi", "store": True}]
            entries = [
                {"custom_id": f"r{number}", "method": "POST", "url": "/v1/responses", "body": body}
                for number, body in enumerate(bodies)
            ]
            content = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
            done = await ended(api, (await begin(api, content, endpoint="/v1/responses")).id)
            found = sorted(await results(api, done.output_file_id), key=lambda one: one["custom_id"])
            unstored, stored = (one["response"]["body"] for one in found)
            assert (unstored["store"], stored["store"]) == (False, True)
            assert (await api.responses.retrieve(stored["id"])).id == stored["id"]
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(unstored["id"])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("allowed", "origin", "status"),
    [
        (["http://good"], "http://evil", 403),
        ([], "http://evil", 403),
        (["http://good"], "http://good", 200),
        (["http://good"], URL, 200),
        (None, "http://evil", 200),
    ],
)
def test_a_page_of_another_origin_uploads_only_if_it_is_allowed(
    tmp_path: Path, allowed: list[str] | None, origin: str, status: int
) -> None:
    async def run() -> None:
        config = ServerConfig(allowed_origins=allowed, fingerprint_mode="none")
        async with serving(FakeClient(), tmp_path, config=config) as (_, api):
            answer = await api._client.post(
                f"{URL}/v1/files",
                files={"file": ("x", b"x")},
                data={"purpose": "batch"},
                headers={"authorization": "Bearer key", "origin": origin},
            )
            assert answer.status_code == status, answer.text

    asyncio.run(run())


def test_a_directory_is_for_servers_that_run_batches(tmp_path: Path) -> None:
    client: Any = FakeClient()
    config = ServerConfig(batch_dir=str(tmp_path))
    for make in (create_app, create_router):
        with pytest.raises(ConfigError, match="octavo serve"):
            make(client, config)
    assert batch_service(ServerConfig(), BackgroundTasks()) is None


def test_a_server_without_a_directory_names_the_flag() -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    for response in (
        post(FakeClient(), "/v1/batches", body),
        request(FakeClient(), "GET", "/v1/files"),
        request(FakeClient(), "POST", "/v1/files", b"x"),
    ):
        assert response.status_code == 404 and "--batch-dir" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] is None
