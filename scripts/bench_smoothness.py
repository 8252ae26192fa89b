"""How a long prompt affects other requests: the gaps of a running stream, and the TTFT of a short prompt.

Each trial starts a stream, then a prompt of 6,000 tokens, then a short prompt while the long one is computed.
bench_serve measures throughput.
"""

import argparse
import asyncio
import random
import statistics
import time
from itertools import pairwise
from typing import Any

import httpx
from bench_report import random_prompt, report, write
from own_server import parse_arguments, server_of

NUM_FIRST_CHUNKS = 16
"""Chunks received before the long prompt is sent, so that the stream is steady."""


def main() -> None:
    """Run the requested trials; print one line for each and a summary."""
    args, serve_flags = _arguments()
    with server_of(args, serve_flags) as url:
        results = asyncio.run(_measure(url, args))
    print(
        f"largest gap of a stream {results['largest_gap_s']:.3f} s (median of trials {results['median_gap_s']:.3f} s), "
        f"short prompt {results['median_short_ttft_s']:.3f} s (alone {results['short_ttft_alone_s']:.3f} s), "
        f"long prompt {results['median_long_ttft_s']:.2f} s"
    )
    write(report("bench_smoothness", {**vars(args), "serve_flags": serve_flags}, results), args.json)


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_smoothness", description="Measures how long prompts disturb streams and short prompts."
    )
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--long-len", type=int, default=6000, help="tokens of the long prompt")
    parser.add_argument("--short-len", type=int, default=64, help="tokens of the short prompt")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and pauses")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    return parse_arguments(parser)


async def _measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def request(
            num_tokens: int, max_tokens: int, times: list[float], is_running: asyncio.Event | None = None
        ) -> None:
            await _stream(client, model, random_prompt(rng, num_tokens), max_tokens, times, is_running)

        await request(args.short_len, 1, [])  # warm-up: the first request of a server loads modules lazily
        alone = [await _timed(request(args.short_len, 1, [])) for _ in range(3)]
        trials = [await _trial(request, rng, args) for _ in range(args.trials)]
    gaps = [trial["gap_s"] for trial in trials]
    return {
        "largest_gap_s": max(gaps),
        "median_gap_s": statistics.median(gaps),
        "median_short_ttft_s": statistics.median(trial["short_ttft_s"] for trial in trials),
        "short_ttft_alone_s": statistics.median(alone),
        "median_long_ttft_s": statistics.median(trial["long_ttft_s"] for trial in trials),
        "trials": trials,
    }


async def _trial(request: Any, rng: random.Random, args: argparse.Namespace) -> dict[str, float]:
    """Return the largest gap of a stream during a long prompt, and the TTFT of the long prompt and of a short one."""
    times: list[float] = []
    is_running = asyncio.Event()
    stream = asyncio.create_task(request(32, 1500, times, is_running))
    try:
        await is_running.wait()
        first = len(times) - 1
        long = asyncio.create_task(_timed(request(args.long_len, 1, [])))
        await asyncio.sleep(rng.uniform(0.3, 2.0))
        short_s = await _timed(request(args.short_len, 1, []))
        long_s = await long
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    gap_s = max(later - earlier for earlier, later in pairwise(times[first:]))
    print(f"gap {gap_s:.3f} s, short prompt {short_s:.3f} s, long prompt {long_s:.2f} s", flush=True)
    return {"gap_s": gap_s, "short_ttft_s": short_s, "long_ttft_s": long_s}


async def _timed(call: Any) -> float:
    start = time.perf_counter()
    await call
    return time.perf_counter() - start


async def _stream(
    client: httpx.AsyncClient,
    model: str,
    prompt: list[int],
    max_tokens: int,
    times: list[float],
    is_running: asyncio.Event | None,
) -> None:
    """Send a streaming completion; append the arrival time of every chunk to `times`.

    Args:
        is_running: set after `NUM_FIRST_CHUNKS` chunks.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        # A chunk then arrives for every token, even if it ends within a character.
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                if is_running and len(times) == NUM_FIRST_CHUNKS:
                    is_running.set()


if __name__ == "__main__":
    main()
