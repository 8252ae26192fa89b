"""`--api-server-count`: several HTTP processes of one engine look like one server to callers, monitors and signals."""

import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from servers import Server, descendants, left_after, serve
from waiting import TIMEOUT_S, wait_until

SMALL = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--served-model-name", "tiny"]
ASK = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
COUNT = 3


@contextlib.contextmanager
def several(model: Path, *flags: str) -> Iterator[Server]:
    with serve(model, *SMALL, "--api-server-count", str(COUNT), *flags) as server:
        yield server.wait_until_ready()


def api_workers(server: Server) -> list[int]:
    """Process ids of the further HTTP processes."""
    return [pid for pid in descendants(server.process.pid) if "http.api_worker" in command(pid)]


def command(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def num_seen(server: Server) -> float:
    """How many requests run, wait or have ended."""
    ended = sample(server.get("/metrics").text, "octavo:request_success_total")
    return server.get("/load").json()["server_load"] + ended


def sample(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def test_workers_share_requests_and_a_killed_one_is_replaced_with_its_counters(model: Path) -> None:
    """Every process exports the metrics of all."""
    with several(model) as server:
        wait_until(lambda: len(api_workers(server)) == COUNT - 1)
        with ThreadPoolExecutor(8) as pool:
            statuses = Counter(pool.map(lambda _: server.post("/v1/completions", ASK).status_code, range(48)))
        assert statuses == {200: 48}
        wait_until(lambda: sample(server.get("/metrics").text, "octavo:generation_tokens_total") == 48 * 4)
        wait_until(lambda: sample(server.get("/metrics").text, "octavo:request_success_total") == 48)
        # Each on a connection, and so a process, of its own. The last reports of the core may come between them.
        texts = wait_until(lambda: seen if len(seen := {server.get("/metrics").text for _ in range(12)}) == 1 else None)
        text = texts.pop()
        assert sample(text, "octavo:e2e_request_latency_seconds_count") == 48
        assert sample(text, "octavo:prompt_tokens_total") == 48 * 3
        wait_until(lambda: server.get("/load").json() == {"server_load": 0})
        before = api_workers(server)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(api_workers(server)) == COUNT - 1 and before[0] not in api_workers(server))
        # Those whose queue waited for the new process are answered as well.
        assert {server.post("/v1/completions", ASK).status_code for _ in range(12)} == {200}
        wait_until(lambda: sample(server.get("/metrics").text, "octavo:request_success_total") == 60)
        server.wait_for("was killed by SIGKILL")
        stored = server.post("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 4}).json()
        assert {server.get(f"/v1/responses/{stored['id']}").json()["id"] for _ in range(12)} == {stored["id"]}
        pids = descendants(server.process.pid)
        server.signal(signal.SIGTERM)
        assert server.wait(TIMEOUT_S) == 0
        assert left_after(pids) == []


def test_those_that_keep_dying_end_the_server_with_the_cause(model: Path) -> None:
    with several(model) as server:
        pids = descendants(server.process.pid)
        survivor = wait_until(lambda: api_workers(server))[0]
        while server.process.poll() is None:
            for pid in set(api_workers(server)) - {survivor}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        assert server.wait(TIMEOUT_S) == 1
        assert "HTTP process" in server.last_line and "SIGKILL" in server.last_line
        assert left_after(pids) == []


def test_a_signal_drains_all_of_them(model: Path) -> None:
    long = ASK | {"max_tokens": 250}
    # One at a time, so that most of them still wait when the signal comes.
    with several(model, "--max-num-seqs", "1") as server, ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(server.post, "/v1/completions", long) for _ in range(12)]
        wait_until(lambda: num_seen(server) == len(asked))
        pids = descendants(server.process.pid)
        server.signal(signal.SIGTERM)
        reasons = [future.result(TIMEOUT_S).json()["choices"][0]["finish_reason"] for future in asked]
        assert reasons == ["length"] * 12
        assert server.wait(TIMEOUT_S) == 0
        assert left_after(pids) == []
        assert server.output.count("requests to finish") == 1
        with pytest.raises(httpx.ConnectError):
            server.get("/health")


@pytest.mark.parametrize("who", ["first", "core"])
def test_a_death_that_cannot_be_survived_leaves_no_process(model: Path, who: str) -> None:
    with several(model, "--no-restart-core") as server:
        pids = descendants(server.process.pid)
        core = next(pid for pid in pids if "core_proc" in command(pid))
        os.kill(server.process.pid if who == "first" else core, signal.SIGKILL)
        # The core's death has to be told to callers first.
        assert left_after(pids) == []
        if who == "core":
            assert server.wait(TIMEOUT_S) == 1
            assert "core" in server.last_line


def test_they_share_a_unix_socket(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serve(model, *SMALL, "--api-server-count", "2", "--uds", str(path)) as server:
        wait_until(lambda: "istening on" in server.output, timeout_s=90)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://octavo.test") as http:
            assert http.post("/v1/completions", json=ASK).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait(TIMEOUT_S) == 0
        assert not path.exists()
