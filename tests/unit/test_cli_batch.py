"""Batches of requests: input lines, the results file, and the run, over the real routes without an engine."""

import asyncio
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_client import MODEL, FakeClient
from http_client import application

from octavo.frontend.batch import results_file as results_module
from octavo.frontend.batch.lines import Answered, BadLine, BatchRequest, BatchResult, read_lines
from octavo.frontend.batch.results_file import ResultsFile
from octavo.frontend.batch.runner import answer_lines, one_by_one
from octavo.frontend.cli import run_batch
from octavo.frontend.cli.errors import CommandError
from octavo.protocol.errors import EngineDeadError, OverloadedError, RequestFailedError

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 3, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def result(number: int, custom_id: str | None = None) -> BatchResult:
    return BatchResult(f"batch_req_{number}", custom_id, Answered(200, "r", _raw(b"{}")), None)


def _raw(data: bytes) -> Any:
    import msgspec

    return msgspec.Raw(data)


def answer(client: FakeClient, lines: list[bytes], max_in_flight: int = 4) -> list[BatchResult]:
    results: list[BatchResult] = []
    work = answer_lines(application(client), client, one_by_one(read_lines(lines)), results.append, max_in_flight)
    asyncio.run(work)
    return results


def test_chat_and_completions_are_answered_as_the_server_does() -> None:
    lines = [line("a"), line("b", "/v1/completions", prompt="x"), line("c", "/tokenize", prompt="xy", messages=None)]
    results = {entry.custom_id: entry for entry in answer(FakeClient(), lines)}
    assert [entry.error for entry in results.values()] == [None] * 3
    bodies = {name: json.loads(bytes(entry.response.body)) for name, entry in results.items() if entry.response}
    assert bodies["a"]["choices"][0]["message"]["content"] == "Hel"
    assert bodies["b"]["choices"][0]["text"] == "Hel"
    assert bodies["c"]["count"] == 3
    assert results["b"].id == "batch_req_2" and results["b"].response and results["b"].response.status_code == 200
    assert bodies["a"]["id"] == f"chatcmpl-{results['a'].response.request_id}"


@pytest.mark.parametrize(
    ("text", "custom_id", "reason"),
    [
        (b"{", None, "line 1: "),
        (b"[1]", None, "line 1: Expected `object`"),
        (b'{"custom_id": "a", "url": "/x"}', "a", "missing required field `body`"),
        (b'{"custom_id": 7, "url": "/x", "body": {}}', None, "custom_id"),
        (b'{"custom_id": "a", "url": "/x", "body": []}', "a", "Expected `object`"),
        (b'{"custom_id": "\xff", "url": "/x", "body": {}}', None, "line 1: "),
        (b'{"custom_id": "a", "method": "GET", "url": "/health", "body": {}}', "a", "method 'GET' is not POST"),
        (b'{"custom_id": "a", "url": "/x", "body": {"stream": true}}', "a", "stream must not be true"),
        (b'{"custom_id": "a", "url": "/x", "body": {"x": ' + b"[" * 9000 + b"]" * 9000 + b"}}", None, "recursion"),
    ],
    ids=str,
)
def test_bad_lines_name_themselves_and_end_nothing(text: bytes, custom_id: str | None, reason: str) -> None:
    bad, good = answer(FakeClient(), [text, line("good")])
    assert (bad.custom_id, bad.response) == (custom_id, None)
    assert bad.error and bad.error.code == "invalid_line"
    assert bad.error.message.startswith("line 1: ") and reason in bad.error.message
    assert good.custom_id == "good" and good.error is None


def test_a_line_may_ask_for_the_health_of_the_engine(tmp_path: Path) -> None:
    (pinged,) = answer(FakeClient(), [line("a", "/ping")])
    with ResultsFile(tmp_path / "out") as results:
        results.append(pinged)
    assert json.loads((tmp_path / "out").read_text())["response"]["body"]["status"] == "healthy"
    with ResultsFile(tmp_path / "out") as results:
        assert results.done == {1: "a"}


def test_rejected_requests_keep_the_servers_answer() -> None:
    lines = [line("a", temperature=-1), line("b", model="gpt-9"), line("c", "/v1/nowhere"), line("d")]
    results = {entry.custom_id: entry for entry in answer(FakeClient(), lines)}
    codes = {name: entry.response.status_code for name, entry in results.items() if entry.response}
    assert codes == {"a": 400, "b": 404, "c": 404, "d": 200}
    assert results["a"].error and results["a"].error.message.startswith("line 1: temperature")
    assert results["b"].error and results["b"].error.code == "NotFoundError"
    assert json.loads(bytes(results["a"].response.body))["error"]["param"] == "temperature"  # type: ignore[union-attr]


def test_second_use_of_a_custom_id_is_a_bad_line() -> None:
    *_, again = read_lines([line("a"), b"\n", line("a")])
    assert again == BadLine(3, "a", "custom_id 'a' is already used by line 1")


def test_request_ids_depend_on_the_custom_id_alone() -> None:
    first, second = BatchRequest(1, "a", CHAT, b""), BatchRequest(9, "a", CHAT, b"x")
    assert first.request_id == second.request_id != BatchRequest(1, "b", CHAT, b"").request_id


def test_no_more_in_flight_than_allowed() -> None:
    client = FakeClient()
    running = most = 0
    plain = client.generate

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            async for output in plain(*arguments, **options):
                await asyncio.sleep(0)
                yield output
        finally:
            running -= 1

    client.generate = counted  # type: ignore[method-assign]
    assert len(answer(client, [line(str(number)) for number in range(20)], max_in_flight=3)) == 20
    assert most == 3


def test_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.batch.runner.RETRY_S", 0.01)
    client = FakeClient()
    client.error = OverloadedError("the queue is full")

    async def work() -> list[BatchResult]:
        results: list[BatchResult] = []
        answering = asyncio.create_task(
            answer_lines(application(client), client, one_by_one(read_lines([line("a")])), results.append, 1)
        )
        await asyncio.sleep(0.1)
        assert not results
        client.error = None
        await answering
        return results

    (entry,) = asyncio.run(work())
    assert entry.error is None


def test_failed_request_is_an_entry() -> None:
    client = FakeClient()
    client.error = RequestFailedError("the step failed")
    (entry,) = answer(client, [line("a")])
    assert entry.error and entry.error.message == "line 1: the step failed"


def test_fault_of_ours_is_an_entry_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    monkeypatch.setattr(client, "default_params", lambda max_tokens: 1 / 0)
    first, second = answer(client, [line("a"), line("b", "/tokenize", prompt="x", messages=None)])
    assert first.response and first.response.status_code == 500 and first.error
    assert second.error is None
    assert "ZeroDivisionError" in caplog.text


def test_dead_engine_ends_the_batch_without_results() -> None:
    client = FakeClient()
    client.failure = EngineDeadError("the core was killed by SIGKILL")
    client.error = client.failure
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        answer(client, [line("a"), line("b")])


def test_full_disk_ends_the_batch_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client = FakeClient()
    with ResultsFile(tmp_path / "out") as results, pytest.raises(CommandError, match="No space left") as raised:
        # Of this module alone: the event loop writes too.
        monkeypatch.setattr(results_module, "os", SimpleNamespace(write=is_full, fsync=os.fsync, close=os.close))
        lines = one_by_one(read_lines([b"bad", line("a")]))
        answering = answer_lines(application(client), client, lines, results.append, 1)
        asyncio.run(answering)
    assert "run the same command again to resume" in raised.value.hint


def test_results_file_remembers_which_lines_are_done(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with ResultsFile(path) as results:
        results.append(result(2, "b"))
        results.append(result(1))
    with ResultsFile(path) as results:
        assert results.done == {2: "b", 1: None}
    with ResultsFile(path, starts_over=True) as results:
        assert results.done == {} and path.read_bytes() == b""


@pytest.mark.parametrize("num_lost", range(1, 30))
def test_a_half_written_line_is_removed(tmp_path: Path, num_lost: int) -> None:
    path = tmp_path / "out"
    with ResultsFile(path) as results:
        results.append(result(1))
        results.append(result(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_lost])
    with ResultsFile(path) as results:
        # Without its line break alone, a result is whole.
        assert results.done.keys() == ({1, 2} if num_lost == 1 else {1})
        results.append(result(3))
    expected = [1, 2, 3] if num_lost == 1 else [1, 3]
    assert [json.loads(text)["id"] for text in path.read_text().splitlines()] == [f"batch_req_{n}" for n in expected]


def test_results_file_rejects_other_files_and_a_second_writer(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nmore\n")
    with pytest.raises(CommandError, match=r"line 1 of .*notes.txt is not a result"):
        ResultsFile(path)
    assert path.read_text() == "my notes\nmore\n"
    with ResultsFile(tmp_path / "out"), pytest.raises(CommandError, match="another process is writing"):
        ResultsFile(tmp_path / "out")
    with pytest.raises(CommandError, match="cannot write"):
        ResultsFile(tmp_path / "no" / "out")
    with pytest.raises(CommandError, match="not a regular file"):
        ResultsFile(Path("/dev/full"))


@pytest.mark.parametrize("model", [[], ["MODEL"]])
def test_a_batch_joins_no_engine(model: list[str]) -> None:
    with pytest.raises(CommandError, match="remove --join"):
        run_batch.run([*model, "--join", "ipc:///nowhere", "-i", "in.jsonl", "-o", "out.jsonl"])
