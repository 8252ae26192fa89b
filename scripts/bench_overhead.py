"""Cost of a request outside the model: HTTP, text and messages, measured with a tiny model.

Starts `octavo serve` with a random Llama of 2 layers, 64 wide, and the default model's tokenizer. Sends short requests
over many connections at once. Reports requests per second, latencies, and the processor time per request of each
process, including the load generator.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fetch_default_model
import httpx
import uvloop
from bench_report import report, summary, write
from http_load import Answer, drive, encode_request
from own_server import serving

from octavo.frontend.model_files.gguf.cache import convert_gguf
from octavo.protocol.env import Env

WARM_UP_REQUESTS = 200

NAME = "tiny"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM supports
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MODES = {
    "completions": ("/v1/completions", False),
    "completions, streamed": ("/v1/completions", True),
    "chat": ("/v1/chat/completions", False),
    "chat, streamed": ("/v1/chat/completions", True),
}
WORDS = ["the", "a", "red", "old", "small", "river", "house", "garden", "stone", "night", "walks", "sings", "under"]


def main() -> None:
    """Run every mode as often as requested and print a table."""
    args, serve_flags = _arguments()
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    with _server(args, serve_flags) as (url, pids):
        name = httpx.get(url.join("/v1/models")).json()["data"][0]["id"]
        rng = random.Random(args.seed)
        for mode in args.modes:
            _measure(url, pids, args, _requests(mode, name, WARM_UP_REQUESTS, args, rng))
        for _, mode in itertools.product(range(args.rounds), args.modes):
            runs[mode].append(_measure(url, pids, args, _requests(mode, name, args.num_requests, args, rng)))
    results = {mode: _median(several) for mode, several in runs.items()}
    _print(results)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    write(
        report("bench_overhead", {**settings, "serve_flags": serve_flags}, {"median": results, "runs": runs}), args.json
    )


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_overhead",
        description=(__doc__ or "").split("\n")[0],
        epilog="What follows -- goes to `octavo serve`.",
    )
    parser.add_argument("--url", help="measure this running server, octavo or another")
    parser.add_argument("--pid", type=int, help="with --url: pid of the server, to measure its processor time")
    parser.add_argument("--write-model", metavar="DIR", help="write the model for another server and exit")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=f"of {list(MODES)}"
    )
    parser.add_argument("--num-requests", type=int, default=2000, help="number of requests of each mode in each round")
    parser.add_argument("--concurrency", type=int, default=200, help="connections, each with one request at a time")
    parser.add_argument("--input-words", type=int, default=16, help="words, about as many tokens, of each prompt")
    parser.add_argument("--max-output-len", type=int, default=4, help="requests ask for 1 to this many tokens in turn")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the median is shown")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    if args.write_model:
        write_model(Path(args.write_model))
        raise SystemExit
    return args, words[split + 1 :]


def write_model(directory: Path) -> None:
    """Write a model without weights, for `--load-format dummy`, into a directory in Hugging Face layout."""
    source = convert_gguf(fetch_default_model.fetch(), Env.read())
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    (directory / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": vocab_size}))


@contextlib.contextmanager
def _server(args: argparse.Namespace, flags: list[str]) -> Iterator[tuple[httpx.URL, dict[str, int]]]:
    """Yield the server's URL and its processes by name; a server that was started here is stopped on exit."""
    if args.url:
        yield httpx.URL(args.url), _processes(args.pid) if args.pid else {}
        return
    limits = ["--load-format", "dummy", "--max-num-seqs", str(args.concurrency), "--kv-cache-memory-bytes", "256M"]
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        with serving(directory, ["--served-model-name", NAME, *limits, *flags]) as (url, pid):
            yield httpx.URL(url), _processes(pid)


def _processes(pid: int) -> dict[str, int]:
    """Return the process and its descendants by name: octavo's by role, others by command."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {"frontend": pid}
    todo = [pid]
    while todo:
        above = todo.pop()
        below = [child for child, parent in parents.items() if parent == above]
        todo += below
        found |= {_process_name(child): child for child in below}
    return found


def _process_name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ours = [word.removeprefix("octavo.").removesuffix("_proc") for word in words if word.startswith("octavo.")]
    return ours[0] if ours else f"{Path(words[0]).name} {pid}"


def _requests(mode: str, model: str, number: int, args: argparse.Namespace, rng: random.Random) -> list[bytes]:
    path, is_streamed = MODES[mode]
    encoded = []
    for index in range(number):
        text = " ".join(rng.choices(WORDS, k=args.input_words))
        prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        body = {"model": model, "max_tokens": 1 + index % args.max_output_len, "temperature": 0, "ignore_eos": True}
        encoded.append(
            encode_request(path, json.dumps({**prompt, **body, "stream": is_streamed}).encode(), "localhost")
        )
    return encoded


def _measure(url: httpx.URL, pids: dict[str, int], args: argparse.Namespace, requests: list[bytes]) -> dict[str, Any]:
    """Send the requests; return rates, latencies in ms, and processor time in ms per request."""
    watched = {"generator": os.getpid(), **pids}
    before = {name: _cpu_seconds(pid) for name, pid in watched.items()}
    start = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers: list[Answer] = runner.run(drive(url.host, url.port or 80, requests, args.concurrency))
    elapsed = time.monotonic() - start
    bad = next((answer for answer in answers if answer.status != 200), None)
    if bad:
        raise SystemExit(f"a request failed: {bad.body.decode(errors='replace')}")
    return {
        "requests_per_s": len(answers) / elapsed,
        "request_ms": summary([1e3 * (answer.finished - answer.sent) for answer in answers]),
        "first_ms": summary([1e3 * (answer.first - answer.sent) for answer in answers]),
        "cpu_ms": {name: 1e3 * (_cpu_seconds(pid) - before[name]) / len(answers) for name, pid in watched.items()},
    }


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process in seconds, including its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the runs, by the names of the values."""
    return {
        name: _median([run[name] for run in runs])
        if isinstance(runs[0][name], dict)
        else statistics.median(run[name] for run in runs)
        for name in runs[0]
    }


def _print(results: dict[str, Any]) -> None:
    names = list(next(iter(results.values()))["cpu_ms"])
    heads = ["requests/s", "median ms", "p99 ms", "first p50", "first p99", *names]
    print(f"{'':>24}" + "".join(f"{head:>12}" for head in heads) + "   (processes: cpu ms per request)")
    for mode, result in results.items():
        times, first = result["request_ms"], result["first_ms"]
        row = [result["requests_per_s"], times["median"], times["p99"], first["median"], first["p99"]]
        print(f"{mode:>24}" + "".join(f"{value:12.1f}" for value in row), end="")
        print("".join(f"{result['cpu_ms'][name]:12.3f}" for name in names))


if __name__ == "__main__":
    main()
