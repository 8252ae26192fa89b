"""Texts per second, and the latency of one short text, of an embedding model, compared with other engines.

All engines stay loaded and idle while one of them is measured. They take turns for some rounds, so the ratios compare
the same minutes. Each has as many threads as there are cores. The table also shows the cosine of the vectors with those
of Sentence Transformers in float32, or of the first engine if that is not measured.
"""

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fetch_embedding_model
from bench_child import BenchChild
from bench_report import report, write

NUM_COMPARED = 20
_WORDS = ["the", "of", "water", "time", "river", "house", "light", "people", "system", "number", "music", "green"]
_DRIVERS = Path(__file__).parent / "bench_pooling_parts" / "drivers.py"
_OCTAVO = {"octavo": {}, "octavo-float32": {"dtype": "float32"}, "octavo-int8": {"quantization": "w8a8"}}
"""Settings of each variant of octavo."""
_LIBRARIES = {"sentence-transformers": "float32", "sentence-transformers-bf16": "bfloat16"}
SYSTEMS = (*_OCTAVO, *_LIBRARIES, "onnxruntime", "llama.cpp", "vllm", "vllm-float32")


def main() -> None:
    """Measure the chosen engines and print a table."""
    args = _arguments()
    rng = random.Random(0)
    texts = [_text(rng, rng.randint(16, 256)) for _ in range(args.num_texts)]
    task = {"texts": texts, "short": _text(rng, 12), "repeats": args.repeats, "num_compared": NUM_COMPARED}
    with ExitStack() as stack:
        engines = [_open(name, args, stack) for name in args.systems.split(",")]
        for engine in engines:
            engine.measure({**task, "texts": texts[:100]})  # warm-up: the first texts load code
        rounds = [{engine.name: engine.measure(task) for engine in engines} for _ in range(args.rounds)]
    reference = "sentence-transformers" if "sentence-transformers" in rounds[0] else engines[0].name
    results = []
    for engine in engines:
        of_engine = [measured[engine.name] for measured in rounds]
        row = {
            "system": engine.name,
            "texts_per_s": len(texts) / statistics.median(each["elapsed_s"] for each in of_engine),
            "latency_ms": 1000 * statistics.median(each["latency_s"] for each in of_engine),
            "least_cosine": _least_cosine(of_engine[0]["vectors"], rounds[0][reference]["vectors"]),
        }
        results.append(row)
        print(
            f"{row['system']:28} {row['texts_per_s']:8.1f} texts/s  {row['latency_ms']:7.2f} ms for one text  "
            f"cosine at least {row['least_cosine']:.6f}"
        )
    write(report("bench_pooling", {"model": args.model, "num_texts": len(texts)}, results), args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_pooling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory of an embedding model; default: all-MiniLM-L6-v2")
    parser.add_argument("--systems", default="octavo,octavo-float32", help=f"separated by commas: {', '.join(SYSTEMS)}")
    parser.add_argument("--num-texts", type=int, default=1000, help="number of texts, of 16 to 256 words each")
    parser.add_argument("--repeats", type=int, default=50, help="number of runs of the short text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--library-python", help="Python with sentence-transformers, onnxruntime and onnx")
    parser.add_argument("--vllm-python", help="Python with vllm")
    parser.add_argument("--llama-server", help="path of llama.cpp's server")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()
    args.model = args.model or str(fetch_embedding_model.fetch())
    if unknown := set(args.systems.split(",")) - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}")
    return args


def _child(name: str, python: str, driver: str, options: dict[str, Any]) -> BenchChild:
    return BenchChild(name, [python, "-P", str(_DRIVERS), driver, json.dumps(options)], _environment())


def _open(name: str, args: argparse.Namespace, stack: ExitStack) -> BenchChild:
    threads = len(os.sched_getaffinity(0))
    options: dict[str, Any] = {"model": args.model, "threads": threads}
    if name in _OCTAVO:
        engine = _child(name, sys.executable, "octavo", {**options, "settings": _OCTAVO[name]})
    elif name in _LIBRARIES:
        python = _needed(args.library_python, "--library-python")
        engine = _child(name, python, "sentence_transformers", {**options, "dtype": _LIBRARIES[name]})
    elif name == "onnxruntime":
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        python = _needed(args.library_python, "--library-python")
        engine = _child(name, python, "onnxruntime", {**options, "onnx": f"{folder}/model.onnx"})
    elif name == "llama.cpp":
        engine = _child(name, sys.executable, "http", {"url": _llama_server(args, threads, stack)})
    else:
        settings = {"dtype": "float32"} if name.endswith("float32") else {}
        engine = _child(name, _needed(args.vllm_python, "--vllm-python"), "vllm", {**options, "settings": settings})
    stack.callback(engine.close)
    return engine


def _llama_server(args: argparse.Namespace, threads: int, stack: ExitStack) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = _needed(args.llama_server, "--llama-server")
    command = [server, "-m", _needed(args.gguf, "--gguf"), "--embedding", "--pooling", "mean", "-t", str(threads)]
    command += ["--port", str(port), "--host", "127.0.0.1", "-b", "4096", "-ub", "4096", "-c", "8192", "-np", "16"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return f"http://127.0.0.1:{port}/v1/embeddings"
        except OSError:
            time.sleep(0.1)
    raise SystemExit("llama-server does not start")


def _needed(value: str | None, flag: str) -> str:
    if value is None or (shutil.which(value) is None and not Path(value).exists()):
        raise SystemExit(f"{flag}: {value}")
    return value


def _environment() -> dict[str, str]:
    threads = str(len(os.sched_getaffinity(0)))
    return {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words - 2))  # a word is one token, and the tokenizer adds two


def _least_cosine(actual: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(actual, expected, strict=True)
    return min(sum(a * b for a, b in zip(*pair, strict=True)) / (_length(pair[0]) * _length(pair[1])) for pair in pairs)


def _length(vector: list[float]) -> float:
    return sum(value * value for value in vector) ** 0.5


if __name__ == "__main__":
    main()
