"""`octavo run-batch` with a tiny model: whole, killed and resumed, through pipes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import warm_python
from servers import of_module
from waiting import TIMEOUT_S, wait_until

FLAGS = ["--cpu-kernels", "torch", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M"]


def command(model: Path, *words: Any) -> list[str]:
    return [sys.executable, "-P", *arguments(model, *words)]


def arguments(model: Path, *words: Any) -> list[str]:
    return ["-m", "octavo", "run-batch", str(model), *FLAGS, *map(str, words)]


def write_input(path: Path, num_lines: int, max_tokens: int = 8) -> Path:
    with path.open("w") as file:
        for number in range(1, num_lines + 1):
            body = {"messages": [{"role": "user", "content": f"tell {number}"}], "max_tokens": max_tokens}
            if number == 3:
                file.write("no request\n")
                continue
            entry = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(entry) + "\n")
    return path


def read(text: str) -> dict[str, Any]:
    entries = [json.loads(line) for line in text.splitlines()]
    by_id = {entry["id"]: entry for entry in entries}
    assert len(by_id) == len(entries), "a line has two results"
    return by_id


def contents(results: dict[str, Any]) -> dict[str, str]:
    return {
        name: entry["response"]["body"]["choices"][0]["message"]["content"]
        for name, entry in results.items()
        if entry["error"] is None
    }


def wait_for_lines(out: Path, count: int, running: subprocess.Popen[Any]) -> None:
    def are_there() -> bool:
        assert running.poll() is None, "it ended early"
        return out.exists() and out.read_bytes().count(b"\n") >= count

    wait_until(are_there, timeout_s=120, interval_s=0.005)


def test_batch_is_the_same_whole_or_killed_and_resumed(model: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 24, max_tokens=120)
    out = tmp_path / "out.jsonl"
    killed = subprocess.Popen(command(model, "-i", source, "-o", out, "--max-inflight", 2), stderr=subprocess.PIPE)
    wait_for_lines(out, 6, killed)
    killed.kill()
    killed.communicate(timeout=TIMEOUT_S)
    before = out.read_bytes()
    num_before = before.count(b"\n")
    assert 6 <= num_before < 24
    out.write_bytes(before + b'{"id": "batch_req_24", "cust')

    resumed = warm_python.run(arguments(model, "-i", source, "-o", out))
    assert resumed.returncode == 0, resumed.stderr
    last = resumed.stderr.splitlines()[-1]
    assert last == f"24 lines done ({num_before} of them in earlier runs), 1 with an error"
    results = read(out.read_text())
    assert results.keys() == {f"batch_req_{number}" for number in range(1, 25)}
    assert results["batch_req_3"]["error"]["message"].startswith("line 3: ")
    assert out.read_bytes().startswith(before)

    # Through pipes, at once, on its own: requests without a seed give the same text all the same.
    whole = subprocess.run(
        command(model, "-i", "-", "-o", "-"), input=source.read_text(), capture_output=True, text=True, check=False
    )
    assert whole.returncode == 0, whole.stderr
    assert contents(read(whole.stdout)) == contents(results)
    assert len(contents(results)) == 23

    # Nothing is left to do: no engine starts (it could not without a way to make processes), and nothing changes.
    done = out.read_bytes()
    without = "import subprocess; from octavo.frontend.cli import main; del subprocess.Popen; raise SystemExit(main())"
    warm_python.run(["-c", without, *arguments(model, "-i", source, "-o", out)[2:]], check=True)
    assert out.read_bytes() == done


def test_dead_engine_is_told_and_loses_nothing(model: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 40, max_tokens=100)
    out = tmp_path / "out.jsonl"
    running = subprocess.Popen(
        command(model, "-i", source, "-o", out, "--max-inflight", 2, "--no-restart-core"),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_lines(out, 3, running)
    (core,) = of_module(running.pid, "octavo.core_proc")
    os.kill(core, signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    last = errors.splitlines()[-1]
    assert "SIGKILL" in last and last.endswith("(run the same command again to resume)")
    results = read(out.read_text())
    assert 3 <= len(results) < 40 and len(contents(results)) >= len(results) - 1


def test_results_of_another_batch_are_not_mixed_in(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "batch_req_1", "custom_id": "other", "response": null, "error": null}\n')
    for num_lines in (2, 0):
        source = write_input(tmp_path / "in.jsonl", num_lines)
        done = warm_python.run(arguments(model, "-i", source, "-o", out))
        assert done.returncode == 1
        assert "holds the results of another batch" in done.stderr and "--overwrite" in done.stderr


def test_missing_input_and_flags(model: Path, tmp_path: Path) -> None:
    done = warm_python.run(arguments(model, "-i", tmp_path / "no", "-o", "-"))
    assert done.returncode == 1 and "cannot read" in done.stderr
    words = ["-i", write_input(tmp_path / "in.jsonl", 1), "-o", "-", "--tool-call-parser", "nobodys"]
    done = warm_python.run(arguments(model, *words))
    assert done.returncode == 1 and "nobodys" in done.stderr
    done = warm_python.run(arguments(model, "-o", "-"))
    assert done.returncode == 2 and "-i/--input-file" in done.stderr
