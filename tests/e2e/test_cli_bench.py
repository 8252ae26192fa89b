"""`octavo bench throughput`, `latency` and `startup` with a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import warm_python

FLAGS = ["--cpu-kernels", "torch", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M"]


def bench(kind: str, model: Path, out: Path, *words: str) -> tuple[str, dict[str, Any]]:
    done = warm_python.run(["-m", "octavo", "bench", kind, str(model), *FLAGS, *words, "--output-json", str(out)])
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def test_throughput(model: Path, tmp_path: Path) -> None:
    words = "--num-prompts 6 --input-len 20 --output-len 5 --n 2"
    printed, saved = bench("throughput", model, tmp_path / "out.json", *words.split())
    assert "Output tokens                                     60" in printed
    assert saved["num_requests"] == 6 and saved["total_num_tokens"] >= 60 + 6 * 20
    assert saved["requests_per_second"] == pytest.approx(6 / saved["elapsed_time"])


def test_latency(model: Path, tmp_path: Path) -> None:
    words = "--batch-size 2 --input-len 8 --output-len 4 --num-iters-warmup 1 --num-iters 3"
    printed, saved = bench("latency", model, tmp_path / "out.json", *words.split())
    assert len(saved["latencies"]) == 3 and "P99 latency (ms)" in printed
    assert min(saved["latencies"]) <= saved["avg_latency"] <= saved["percentiles"]["99"] <= max(saved["latencies"])


def test_startup(model: Path, tmp_path: Path) -> None:
    words = "--num-iters-cold 1 --num-iters-warmup 0 --num-iters-warm 1"
    printed, saved = bench("startup", model, tmp_path / "out.json", *words.split())
    assert "Cold start" in printed and "Warm start" in printed
    for kind in ("cold", "warm"):
        assert 0 < saved[kind]["ready_s"]["avg"] < saved[kind]["first_token_s"]["avg"]


def test_failed_start_tells_the_cause(tmp_path: Path) -> None:
    done = warm_python.run(["-m", "octavo", "bench", "startup", str(tmp_path / "nothing")])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("octavo: error: the server did not start: octavo: error: ")
