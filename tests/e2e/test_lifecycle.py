"""`octavo serve` as seen from a terminal: starting, failing to start, stopping, being killed."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import FORK_SERVER, Server, cpu_seconds, descendants, left_after, of_module, send_signal, serve
from slow_steps import PLUGIN, SLOW
from waiting import TIMEOUT_S, wait_until

SMALL = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4"]
LONG_REQUEST = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with serve(model, *SMALL, "--served-model-name", "tiny") as server:
        yield server.wait_until_ready()


def core_and_worker(server: Server) -> list[int]:
    (core,) = of_module(server.process.pid, "octavo.core_proc")
    (worker,) = of_module(core, "octavo.worker_proc")
    assert set(descendants(server.process.pid)) == {core, worker, *of_module(server.process.pid, FORK_SERVER)}
    return [core, worker]


def stream(server: Server, **fields: Any) -> Iterator[dict]:
    """Chunks of a long completion as they come."""
    body = {**LONG_REQUEST, **fields, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


# --- failed starts: the last line is the root cause -------------------------------------------


def failed_start(model: Path | str, *flags: str) -> str:
    with serve(model, *flags) as server:
        assert server.wait(90) == 1
        assert "Traceback" not in server.output
        return "\n".join(server.lines[-2:])


def test_a_missing_model(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in failed_start(tmp_path / "nothing")


def test_a_missing_weights_file(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    assert "safetensors" in failed_start(tmp_path)


def test_damaged_weights(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (weights,) = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert weights.name in failed_start(tmp_path)


def test_a_broken_config(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text("{ not json")
    assert "config.json" in failed_start(tmp_path)


def test_an_unsupported_architecture(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["MadeUpForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = failed_start(tmp_path)
    assert "MadeUpForCausalLM" in message
    assert "LlamaForCausalLM" in message, "the supported ones are listed"


def test_a_bad_flag_value(model: Path) -> None:
    with serve(model, "--block-size", "0") as server:
        assert server.wait(30) != 0
        assert "block" in server.last_line


def test_a_port_in_use(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        message = failed_start(model, *SMALL, "--port", port)
    assert port in message
    assert "in use" in message


def test_not_enough_memory_names_the_flag_that_would_help(model: Path) -> None:
    message = failed_start(model, *SMALL, "--kv-cache-memory-bytes", "4096")
    assert "--kv-cache-memory-bytes" in message or "--max-model-len" in message


# --- ends ---------------------------------------------------------------------------------


def test_sigint_drains(server: Server) -> None:
    pids = core_and_worker(server)
    chunks = stream(server)
    next(chunks)
    server.signal(signal.SIGINT)
    *_, last = chunks
    assert last["choices"][0]["finish_reason"] == "length", "a running request is finished first"
    assert server.wait(TIMEOUT_S) == 0
    assert left_after(pids) == []


def test_a_second_sigint_aborts(model: Path) -> None:
    flags = ("--served-model-name", "tiny", "--max-model-len", "1024", "--logits-processors", PLUGIN)
    with serve(model, *SMALL[:2], *flags) as server:
        server.wait_until_ready()
        pids = core_and_worker(server)
        chunks = stream(server, max_tokens=1000, vllm_xargs=SLOW)
        next(chunks)
        send_signal(server.process.pid, signal.SIGINT)
        server.signal(signal.SIGINT)
        *_, last = chunks
        assert last["choices"][0]["finish_reason"] == "abort"
        assert server.wait(TIMEOUT_S) == 0
        assert left_after(pids) == []


def test_killing_the_server_leaves_no_process(model: Path) -> None:
    """While it starts, and then, of a server that starts after that, while it is idle."""
    for during in ("start", "idle"):
        with serve(model, *SMALL, is_warm=False) as server:
            if during == "idle":
                server.wait_until_ready()
            wait_until(lambda: len(descendants(server.process.pid)) >= 2)
            pids = descendants(server.process.pid)
            server.signal(signal.SIGKILL)
            assert left_after(pids) == []


@pytest.fixture
def mortal(model: Path) -> Iterator[Server]:
    """A server whose engine is not started again."""
    flags = ("--served-model-name", "tiny", "--no-restart-core", "--logits-processors", PLUGIN)
    with serve(model, *SMALL, *flags) as server:
        yield server.wait_until_ready()


def test_killing_the_core_is_told_and_ends_the_server(mortal: Server) -> None:
    server = mortal
    core, worker = core_and_worker(server)
    chunks = stream(server, vllm_xargs=SLOW)
    next(chunks)
    os.kill(core, signal.SIGKILL)
    rest = list(chunks)
    assert "error" in rest[-1]
    assert left_after([core, worker]) == []
    assert server.wait(TIMEOUT_S) != 0
    assert "core" in server.last_line


def test_a_drain_that_loses_its_requests_is_a_failure(mortal: Server) -> None:
    server = mortal
    core, worker = core_and_worker(server)
    chunks = stream(server, vllm_xargs=SLOW)
    next(chunks)
    os.kill(worker, signal.SIGSTOP)  # the request cannot end by itself
    server.signal(signal.SIGTERM)
    server.wait_for("no new requests")
    os.kill(core, signal.SIGKILL)
    assert "error" in list(chunks)[-1]
    assert server.wait(TIMEOUT_S) != 0
    assert "core" in server.last_line
    assert left_after([core, worker]) == []


def test_killing_the_worker_is_a_pause(server: Server) -> None:
    _, worker = core_and_worker(server)
    undisturbed = [chunk["choices"][0]["text"] for chunk in stream(server) if chunk["choices"]]
    chunks = stream(server)
    texts = [next(chunks)["choices"][0]["text"]]
    os.kill(worker, signal.SIGKILL)
    texts += [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == "".join(undisturbed)
    server.wait_for("worker 0 was killed by SIGKILL")
    wait_until(lambda: server.get("/health").status_code == 200)
    assert left_after([worker]) == []


def test_idle_costs_nothing(server: Server) -> None:
    pids = [server.process.pid, *core_and_worker(server)]
    body = {**LONG_REQUEST, "max_tokens": 5}
    assert server.post("/v1/completions", body).status_code == 200
    used: dict[int, float] = {}

    def are_idle() -> bool:
        before = {pid: cpu_seconds(pid) for pid in pids}
        time.sleep(1.0)
        used.update({pid: cpu_seconds(pid) - before[pid] for pid in pids})
        return sum(used.values()) <= 0.015

    # The last reports and the worker's thread pool take a moment to come to rest.
    wait_until(are_idle, lambda: f"CPU seconds used in a second while idle: {used}")
