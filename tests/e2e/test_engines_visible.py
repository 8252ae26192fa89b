"""What an operator sees of several engines: process titles, metrics, KV events, the dashboard."""

import json
from pathlib import Path

import msgspec
import zmq
from servers import descendants, serve
from waiting import wait_until


def stored_tokens(endpoint: str) -> list[int]:
    """Return the tokens of all blocks that an engine has stored, by the events that it sends again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(endpoint)
        client.send_multipart((b"", bytes(8)))
        tokens: list[int] = []
        while client.poll(10_000) and (frames := client.recv_multipart())[2]:
            _, events, _ = msgspec.msgpack.decode(frames[2])
            tokens += [token for event in events for token in event.get("token_ids", ())]
        return tokens


def test_both_engines_are_seen(model: Path, tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": replay}
    flags = ("--dtype", "float32", "--max-model-len", "256", "-dp", "2", "--kv-events-config", json.dumps(events))
    with serve(model, *flags) as running:
        server = running.wait_until_ready()
        titles = {Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] for pid in descendants(server.process.pid)}
        assert titles >= {"octavo core 0", "octavo core 1", "octavo worker 0.0", "octavo worker 1.0"}
        for token in (9, 11):  # idle engines take turns
            body = {"model": str(model), "prompt": [token] * 40, "max_tokens": 1}
            assert server.post("/v1/completions", body).status_code == 200
        expected = [[9] * 32, [11] * 32]
        wait_until(lambda: sorted(stored_tokens(replay + suffix) for suffix in ("", "_dp1")) == expected)

        def finished(engine: int) -> float:
            name = f'octavo:request_params_n_count{{engine="{engine}",model_name="{model}"}} '
            return float(server.get("/metrics").text.partition(name)[2].split()[0])

        assert [finished(0), finished(1)] == [1, 1]
