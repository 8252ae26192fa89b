"""`octavo serve` whose core is killed: callers of all HTTP processes get the answers of an undisturbed run."""

import concurrent.futures
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server, are_reaped, as_init_process, descendants, left_after, of_module, serve
from waiting import wait_until

FLAGS = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--served-model-name", "tiny"]
NUM_CALLERS = 8


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serve(model, *FLAGS, "--api-server-count", "2") as server:
        yield server.wait_until_ready()


def body(seed: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 240,
        "temperature": 1,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 2,
        "stream": seed % 2 == 0,
        "n": 1 + seed % 3,
    }


def complete(server: Server, seed: int) -> list[Any]:
    """Return the text, the logprobs and the end of each choice, streamed or not, and what was counted."""
    asked = body(seed)
    if not asked["stream"]:
        answer = server.post("/v1/completions", asked).json()
        return [[(c["text"], c["logprobs"], c["finish_reason"]) for c in answer["choices"]], answer["usage"]]
    asked["stream_options"] = {"include_usage": True}
    texts, logprobs, ends, usage = [""] * asked["n"], [[] for _ in range(asked["n"])], [None] * asked["n"], None
    with httpx.stream("POST", server.url + "/v1/completions", json=asked, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                logprobs[choice["index"]] += (choice["logprobs"] or {}).get("token_logprobs", [])
                ends[choice["index"]] = choice["finish_reason"]
    return [list(zip(texts, logprobs, ends, strict=True)), usage]


def core_of(server: Server) -> int:
    """Return the core, once that before it is gone."""
    return wait_until(lambda: cores if len(cores := of_module(server.process.pid, "octavo.core_proc")) == 1 else [])[0]


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def health(server: Server) -> int:
    return httpx.get(server.url + "/health", timeout=10).status_code


def test_callers_of_all_processes_get_their_answers(server: Server) -> None:
    alone = [complete(server, seed) for seed in range(NUM_CALLERS)]
    with concurrent.futures.ThreadPoolExecutor(NUM_CALLERS) as pool:
        calls = [pool.submit(complete, server, seed) for seed in range(NUM_CALLERS)]
        time.sleep(0.1)
        os.kill(core_of(server), signal.SIGKILL)
        server.wait_for("is back after")
        got = [call.result(60) for call in calls]
    assert got == alone
    wait_until(lambda: health(server) == 200)  # the other HTTP process may learn of the new core a moment later


def test_no_zombies_are_left_of_processes_that_were_killed(server: Server) -> None:
    with as_init_process():
        core = core_of(server)
        (http,) = wait_until(lambda: [p for p in descendants(server.process.pid) if b"api_worker" in cmdline(p)])
        killed = [core, *descendants(core), http]
        for pid in (core, http):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: are_reaped(killed), lambda: server.output)


def test_a_signal_restarts_the_engine_and_a_kill_leaves_nothing(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 4\n")
    flags = [*FLAGS[:4], *FLAGS[6:], "--config", str(file), "--api-server-count", "2"]
    with serve(model, *flags, is_warm=False) as server:
        server.wait_until_ready()
        alone = [complete(server, seed) for seed in range(4)]
        before = core_of(server)
        file.write_text("max-num-seqs: 2\n")
        server.signal(signal.SIGUSR2)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            deadline = time.monotonic() + 60
            while server.output.count("is back after") < 2:
                assert time.monotonic() < deadline, server.output
                assert list(pool.map(lambda seed: complete(server, seed), range(4))) == alone
        assert core_of(server) != before
        file.write_text("max-num-seqs: none\n")
        server.signal(signal.SIGUSR2)
        server.wait_for("its engine continues unchanged")
        assert complete(server, 3) == alone[3]
        # Core, worker, fork server and one more HTTP process; the processes before them end a moment later.
        pids = wait_until(lambda: pids if len(pids := descendants(server.process.pid)) == 4 else None)
        server.signal(signal.SIGKILL)
        assert left_after(pids) == []
