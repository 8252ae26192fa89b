"""An engine that makes no progress: `/health` reports it, and the log gets the stacks of all processes once."""

import os
import signal
import threading
import time
from pathlib import Path

from servers import Server, of_module, serve
from waiting import join, wait_until


def test_every_stall_is_reported_once_and_the_engine_recovers(model: Path) -> None:
    # Its own fork server: the watchdog describes the processes below it.
    with serve(model, "--watchdog-timeout", "1.0", "--served-model-name", "m", is_warm=False) as server:
        server.wait_until_ready()
        for num_stalls, which in enumerate(["octavo.worker_proc", "octavo.core_proc"], 1):
            check_stall(server, which, num_stalls)
        time.sleep(1.0)
        assert server.output.count("the stacks of all processes follow") == 2


def check_stall(server: Server, which: str, num_stalls: int) -> None:
    assert server.get("/health").status_code == 200
    (stopped,) = of_module(server.process.pid, which)
    os.kill(stopped, signal.SIGSTOP)
    assert server.get("/health").status_code == 200, "it is idle as far as anybody can tell"
    # One token: with more, a busy machine could pause between two of them, which is one more stall.
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body).status_code))
    asking.start()
    try:
        server.wait_for("the stacks of all processes follow", num_stalls)
        health = server.get("/health")
        assert health.status_code == 503
        assert "the engine has not" in health.json()["reason"]
        server.wait_for(rf"pid {stopped} \({which}\) is stopped")
        server.wait_for("most recent call first", 2 * num_stalls)
    finally:
        os.kill(stopped, signal.SIGCONT)
        join(asking)
    assert answers == [200]
    server.wait_for("the stall is over", num_stalls)
    wait_until(lambda: server.get("/health").status_code == 200)
