"""Batches and stored responses of a real server with several HTTP processes, which is killed and started again."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
from servers import Server, serve
from waiting import wait_until

FLAGS = (
    *("--dtype", "float32", "--cpu-kernels", "torch", "--max-model-len", "256", "--max-num-seqs", "4"),
    *("--served-model-name", "tiny", "--api-server-count", "2"),
)
NUM_LINES = 12


def body(number: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"n{number}", "max_tokens": 60, "seed": number, "ignore_eos": True}


def lines() -> bytes:
    entries = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body(number)}
        for number in range(NUM_LINES)
    ]
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def read_from_all_processes(server: Server, path: str) -> list[dict[str, Any]]:
    """Read a path over many connections, of which each process gets some."""
    found = []
    for _ in range(12):
        response = httpx.get(server.url + path, timeout=30)
        assert response.status_code == 200, response.text
        found.append(response.json())
    return found


def test_a_killed_server_goes_on(model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--batch-dir", str(tmp_path / "batches"), "--response-store", str(tmp_path / "responses.db"))
    with serve(model, *flags) as server, client_of(server.wait_until_ready()) as api:
        file = api.files.create(file=("in.jsonl", lines()), purpose="batch")
        batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        begun = api.responses.create(model="tiny", input="hi", background=True, max_output_tokens=200)
        read_from_all_processes(server, f"/v1/responses/{begun.id}")
        wait_until(
            lambda: (api.batches.retrieve(batch.id).request_counts.completed or 0) >= 2, lambda: "waiting for results"
        )
        server.close()
    with serve(model, *flags) as server, client_of(server.wait_until_ready()) as api:
        responses = read_from_all_processes(server, f"/v1/responses/{begun.id}")
        assert {one["status"] for one in responses} <= {"completed", "incomplete", "failed"}
        wait_until(lambda: api.batches.retrieve(batch.id).status == "completed", lambda: "waiting for the batch")
        done = api.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (NUM_LINES, 0)
        answers = [json.loads(line) for line in api.files.content(done.output_file_id or "").text.splitlines()]
        texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
        assert len(answers) == len(texts) == NUM_LINES
        for number in (0, NUM_LINES - 1):
            direct = server.post("/v1/completions", body(number)).json()["choices"][0]["text"]
            assert direct == texts[f"r{number}"]
