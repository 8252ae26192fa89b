"""What an operator sees of several engines: process titles, metrics, KV events, the dashboard."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from browser import browser
from servers import Server, of_module, serve
from waiting import wait_until


def stored_tokens(endpoint: str) -> list[int]:
    """Return the tokens of all blocks that an engine has stored, by the events that it sends again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(endpoint)
        client.send_multipart((b"", bytes(8)))
        tokens: list[int] = []
        while client.poll(10_000) and (frames := client.recv_multipart())[-1]:
            _, events, _ = msgspec.msgpack.decode(frames[-1])
            tokens += [token for event in events for token in event.get("token_ids", ())]
        return tokens


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where engine 0 sends its events again."""
    return f"ipc://{tmp_path_factory.mktemp('events')}/replay"


@pytest.fixture(scope="module")
def server(model: Path, replay: str) -> Iterator[Server]:
    """A server with two engines."""
    events = {"enable_kv_cache_events": True, "endpoint": f"{replay}.pub", "replay_endpoint": replay}
    flags = ("--dtype", "float32", "--max-model-len", "256", "-dp", "2", "--served-model-name", "tiny")
    with serve(model, *flags, "--kv-events-config", json.dumps(events)) as running:
        yield running.wait_until_ready()


def test_titles_events_metrics_and_state_tell_engines_apart(server: Server, replay: str) -> None:
    pids = [pid for kind in ("core", "worker") for pid in of_module(server.process.pid, f"octavo.{kind}_proc")]
    titles = {Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] for pid in pids}
    assert titles >= {"octavo core 0", "octavo core 1", "octavo worker 0.0", "octavo worker 1.0"}
    for token in (9, 11):  # idle engines take turns
        body = {"model": "tiny", "prompt": [token] * 40, "max_tokens": 1}
        assert server.post("/v1/completions", body).status_code == 200
    expected = [[9] * 32, [11] * 32]
    wait_until(lambda: sorted(stored_tokens(replay + suffix) for suffix in ("", "_dp1")) == expected)

    def finished(engine: int) -> float:
        name = f'octavo:request_params_n_count{{engine="{engine}",model_name="tiny"}} '
        return float(server.get("/metrics").text.partition(name)[2].split()[0])

    assert [finished(0), finished(1)] == [1, 1]
    state = server.get("/dashboard/state?engine=1").json()
    assert [row["state"] for row in state["engines"]] == ["up", "up"]
    assert (state["shown"], state["stats"]["prompt_tokens"]) == (1, 40)


def test_the_page_lists_all_engines_and_shows_one(server: Server) -> None:
    with browser() as page:
        page.open(server.url + "/#engine")
        rows = "[...document.querySelectorAll('#engines tbody tr')]"
        page.wait_for(f"{rows}.length === 2 && !document.querySelector('#engines-card').hidden")
        assert page.run(f"{rows}.map((row) => row.ariaSelected)") == ["true", "false"]
        page.run(f"{rows}[1].click()")
        page.wait_for(f"{rows}[1].ariaSelected === 'true'")
        assert page.run(f"{rows}.map((row) => row.children[1].textContent)") == ["up", "up"]
        assert page.problems == []
