"""An engine that does not move: `/health` says so, and the log has the stacks of all processes, once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from servers import Server, descendants, serve
from tiny_models import make_tiny


def until(server: Server, text: str, count: int = 1) -> None:
    """Wait until the log holds a text so many times."""
    deadline = time.monotonic() + 30
    while server.output.count(text) < count:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny("LlamaForCausalLM", path)
    return path


@pytest.mark.parametrize("which", ["octavo.worker_proc", "octavo.core_proc"])
def test_a_stalled_engine_is_told_of_once_and_recovers(model: Path, which: str) -> None:
    with serve(model, "--watchdog-timeout", "1.5", "--served-model-name", "m") as server:
        server.wait_until_ready()
        assert server.get("/health").status_code == 200
        (stopped,) = [
            pid for pid in descendants(server.process.pid) if which in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(stopped, signal.SIGSTOP)
        assert server.get("/health").status_code == 200, "it is idle as far as anybody can tell"
        body = {"model": "m", "prompt": "a", "max_tokens": 4}
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body).status_code))
        asking.start()
        try:
            until(server, "the stacks of all processes follow")
            health = server.get("/health")
            assert health.status_code == 503
            assert "the engine has not" in health.json()["reason"]
            until(server, f"pid {stopped} ({which}) is stopped")
            until(server, "most recent call first", count=2)
        finally:
            os.kill(stopped, signal.SIGCONT)
            asking.join()
        assert answers == [200]
        until(server, "the stall is over")
        assert server.get("/health").status_code == 200
        time.sleep(1.5)
        assert server.output.count("the stacks of all processes follow") == 1
