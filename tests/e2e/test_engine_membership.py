"""Engines join, drain, leave and are replaced while a server with several HTTP processes answers."""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import warm_python
from servers import Server, descendants, serve
from tiny_models import make_tiny
from waiting import wait_until

KEY = "operator"
FLAGS = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--served-model-name", "tiny")
SEVERAL = ("-dp", "2", "--api-server-count", "2", "--admin-api-key", KEY)


def ask(number: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [5, 6, 7, number], "max_tokens": 60, "seed": number, "ignore_eos": True, "n": 2}


class Load:
    """Callers that ask one after another while engines change, and what they got."""

    def __init__(self, server: Server, num_callers: int = 4) -> None:
        self.answers: list[tuple[int, int, list[str], str]] = []
        """Number of the request, status, texts, and fingerprint."""
        self._server = server
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_callers)
        self._callers = [self._pool.submit(self._call, caller) for caller in range(num_callers)]

    def _call(self, caller: int) -> None:
        number = caller
        while not self._stop.is_set():
            response = self._server.post("/v1/completions", ask(number % 8))
            body = response.json()
            texts = [choice["text"] for choice in body.get("choices", [])]
            self.answers.append((number % 8, response.status_code, texts, body.get("system_fingerprint", "")))
            number += 1

    def wait_for(self, count: int) -> None:
        """Wait until there are so many more answers."""
        target = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= target, timeout_s=120)

    def stop(self) -> list[tuple[int, int, list[str], str]]:
        self._stop.set()
        for caller in self._callers:
            caller.result(120)
        self._pool.shutdown()
        assert Counter(status for _, status, _, _ in self.answers) == {200: len(self.answers)}, "a request failed"
        return self.answers


def admin(server: Server, action: str = "", **body: Any) -> httpx.Response:
    url, headers = f"{server.url}/v1/engines", {"authorization": f"Bearer {KEY}"}
    if not action:
        return httpx.get(url, headers=headers, timeout=30)
    return httpx.post(f"{url}/{action}", json=body, headers=headers, timeout=150)


def states(response: httpx.Response) -> dict[int, str]:
    assert response.status_code == 200, response.text
    return {engine["index"]: engine["state"] for engine in response.json()["data"]}


def seen(server: Server) -> list[list[int]]:
    """Return the engines that `/health` of every HTTP process lists; connections go to either."""
    return [[one["engine"] for one in server.get("/health").json()["engines"]] for _ in range(8)]


def texts_of(server: Server) -> dict[int, list[str]]:
    """Return the answers of a server without load."""
    answers = {number: server.post("/v1/completions", ask(number)) for number in range(8)}
    return {number: [choice["text"] for choice in answer.json()["choices"]] for number, answer in answers.items()}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serve(model, *FLAGS, *SEVERAL) as server:
        yield server.wait_until_ready()


def test_only_the_admin_key_opens_the_routes(server: Server) -> None:
    assert server.get("/v1/engines").status_code == 401
    assert httpx.get(f"{server.url}/v1/engines", headers={"authorization": "Bearer other"}).status_code == 401
    assert server.post("/v1/engines/drain", {"index": 0}).status_code == 401
    assert server.get("/v1/models").status_code == 200, "which needs no key here"
    assert states(admin(server)) == {0: "up", 1: "up"}


def test_an_engine_that_dies_is_not_missed(server: Server) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 30, "seed": 1, "ignore_eos": True}

    def complete() -> str:
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    text = complete()
    shown = {cmdline(pid).split(b"\0")[0].decode() for pid in descendants(server.process.pid)}
    assert shown >= {"octavo core 0", "octavo core 1", "octavo worker 0.0", "octavo worker 1.0"}
    health = server.get("/health").json()
    assert health["status"] == "healthy" and [one["state"] for one in health["engines"]] == ["up", "up"]
    assert {complete() for _ in range(6)} == {text}
    os.kill(next(pid for pid in descendants(server.process.pid) if b"core_proc" in cmdline(pid)), signal.SIGKILL)
    assert {complete() for _ in range(6)} == {text}, "while an engine is away"
    assert server.get("/health").status_code == 200
    wait_until(lambda: all(one["ok"] for one in server.get("/health").json()["engines"]))


def test_an_engine_joins_drains_and_leaves_under_load(server: Server) -> None:
    expected = texts_of(server)
    load = Load(server)
    load.wait_for(8)
    assert states(admin(server, "add")) == {0: "up", 1: "up", 2: "up"}
    assert seen(server) == [[0, 1, 2]] * 8
    wait_until(lambda: any(one["num_running"] for one in admin(server).json()["data"] if one["index"] == 2))
    assert states(admin(server, "drain", index=0, timeout=0.0)) == {0: "draining", 1: "up", 2: "up"}
    load.wait_for(8)
    drained = admin(server).json()["data"][0]
    assert (drained["num_running"], drained["num_waiting"]) == (0, 0), "it gets nothing new"
    assert states(admin(server, "resume", index=0)) == {0: "up", 1: "up", 2: "up"}
    workers = [pid for pid in descendants(server.process.pid) if b"api_worker" in cmdline(pid)]
    os.kill(workers[0], signal.SIGSTOP)  # its requests wait; nothing may be decided without it
    removing = ThreadPoolExecutor(1).submit(admin, server, "remove", index=2)
    os.kill(workers[0], signal.SIGCONT)
    assert states(removing.result(120)) == {0: "up", 1: "up"}
    load.wait_for(8)
    for number, _, texts, _ in load.stop():
        assert texts == expected[number]
    assert seen(server) == [[0, 1]] * 8


def test_errors_name_the_remedy(server: Server) -> None:
    unknown = admin(server, "drain", index=7)
    assert unknown.status_code == 400 and "use one of 0, 1" in unknown.text
    assert states(admin(server, "drain", index=1)) == {0: "up", 1: "draining"}
    last = admin(server, "remove", index=0)
    assert last.status_code == 409 and "add another one first" in last.text
    assert states(admin(server, "resume", index=1)) == {0: "up", 1: "up"}
    missing = admin(server, "replace", model="/nowhere")
    assert missing.status_code == 500 and "/nowhere" in missing.text
    assert states(admin(server)) == {0: "up", 1: "up"}


def test_the_command_line(server: Server) -> None:
    command = ["-m", "octavo", "admin", "engines", "list", "--url", server.url]
    done = warm_python.run([*command, "--admin-api-key", KEY], timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["ENGINE", "STATE"], ["0", "up"], ["1", "up"]]
    wrong = warm_python.run([*command, "--admin-api-key", "no"], timeout=60)
    assert wrong.returncode == 1 and "401" in wrong.stderr


def test_other_weights_replace_all_engines_under_load(server: Server, tmp_path: Path) -> None:
    other = make_tiny("LlamaForCausalLM", tmp_path / "other", seed=1)
    before = texts_of(server)
    load = Load(server)
    load.wait_for(8)
    after_states = states(admin(server, "replace", model=str(other)))
    assert list(after_states.values()) == ["up", "up"]
    load.wait_for(8)
    answers = load.stop()
    after = texts_of(server)
    assert all(before[number] != after[number] for number in before)
    kinds: dict[str, set[str]] = {}
    for number, _, texts, fingerprint in answers:
        assert texts in (before[number], after[number]), "an answer of both weights"
        kinds.setdefault(fingerprint, set()).add("old" if texts == before[number] else "new")
    assert sorted(map(sorted, kinds.values())) == [["new"], ["old"]], "the fingerprint names the weights"
    assert [card["root"] for card in server.get("/v1/models").json()["data"]] == [str(other)]
    # A process that starts now learns of the new engines.
    worker = next(pid for pid in descendants(server.process.pid) if b"api_worker" in cmdline(pid))
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: worker not in descendants(server.process.pid))
    assert texts_of(server) == after
    assert seen(server) == [sorted(after_states)] * 8


@pytest.mark.long
def test_a_signal_with_other_weights_lets_requests_finish_where_they_began(model: Path, tmp_path: Path) -> None:
    other = make_tiny("LlamaForCausalLM", tmp_path / "other", seed=1)
    config, address = tmp_path / "octavo.yaml", tmp_path / "public"
    config.write_text(f"model: {model}\n")
    with serve(f"--config={config}", *FLAGS, *SEVERAL, "--engine-address", f"ipc://{address}") as server:
        before = texts_of(server.wait_until_ready())
        with serve(f"--join=ipc://{address},ipc://{address}.1") as joined:
            joined.wait_until_ready()
            load = Load(server)
            load.wait_for(8)
            config.write_text(f"model: {other}\n")
            server.signal(signal.SIGUSR2)
            server.wait_for("engine 1 is removed", timeout_s=120)
            load.wait_for(8)
            answers = load.stop()
            after = texts_of(server)
            assert all(texts in (before[number], after[number]) for number, _, texts, _ in answers)
            assert before != after
            assert texts_of(joined) == after, "its addresses lead to the new engines"
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert not address.is_symlink()


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 4])
def test_engines_that_die_while_they_are_replaced_lose_nothing(model: Path, tmp_path: Path, seed: int) -> None:
    other = make_tiny("LlamaForCausalLM", tmp_path / "other", seed=1)
    rng, stop, kills = random.Random(seed), threading.Event(), []
    with serve(model, *FLAGS, *SEVERAL) as server:
        before = texts_of(server.wait_until_ready())
        load = Load(server)

        def kill() -> None:
            """Kill cores that have requests; one that starts would fail the replacement, as it should."""
            while not stop.wait(rng.uniform(1.0, 5.0)):
                able = [f"octavo core {index}" for index, state in states(admin(server)).items() if state != "starting"]
                found = [
                    pid for pid in descendants(server.process.pid) if cmdline(pid).split(b"\0")[0].decode() in able
                ]
                if found:  # else all of them are between two cores
                    kills.append(rng.choice(found))
                    os.kill(kills[-1], signal.SIGKILL)

        load.wait_for(4)
        killer = ThreadPoolExecutor(1).submit(kill)
        replaced = admin(server, "replace", model=str(other))
        stop.set()
        killer.result(60)
        assert replaced.status_code == 200, replaced.text
        load.wait_for(8)
        answers = load.stop()
        after = texts_of(server)
        assert kills
        assert all(texts in (before[number], after[number]) for number, _, texts, _ in answers)


@pytest.mark.long
def test_a_new_process_does_without_an_engine_that_is_gone_for_good(model: Path) -> None:
    with serve(model, *FLAGS, *SEVERAL, "--no-restart-core") as server:
        expected = texts_of(server.wait_until_ready())
        pids = descendants(server.process.pid)
        os.kill(next(pid for pid in pids if b"core_proc" in cmdline(pid)), signal.SIGKILL)
        wait_until(lambda: "down" in states(admin(server)).values())
        worker = next(pid for pid in pids if b"api_worker" in cmdline(pid))
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: any(b"api_worker" in cmdline(pid) for pid in descendants(server.process.pid)))
        assert texts_of(server) == expected
        down = next(index for index, state in states(admin(server)).items() if state == "down")
        assert states(admin(server, "add"))[2] == "up"
        assert list(states(admin(server, "remove", index=down)).values()) == ["up", "up"]
        assert texts_of(server) == expected


@pytest.mark.long
def test_a_server_that_has_joined_its_engines_adds_others(model: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("a", "b")]
    hosts = [Server(model, *FLAGS, "--headless", "--engine-address", address) for address in addresses]
    try:
        for host in hosts:
            host.wait_for("headless: serving")
        with serve(f"--join={addresses[0]}", "--admin-api-key", KEY) as server:
            server.wait_until_ready()
            started = admin(server, "add")
            assert started.status_code == 409 and "give the address" in started.text
            assert states(admin(server, "add", address=addresses[1])) == {0: "up", 1: "up"}
            assert admin(server, "add", address=addresses[1]).status_code == 409
            assert states(admin(server, "remove", index=0)) == {1: "up"}
            hosts[0].close()
            assert texts_of(server)
    finally:
        for host in hosts:
            host.close()


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
