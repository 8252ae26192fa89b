"""Load on a running server, or on one started for the purpose: throughput, TTFT, TPOT and ITL.

It speaks the OpenAI completions API with prompts of token ids, so it measures any server that does.
TTFT is the time to the first text, ITL the time between two pieces of text, TPOT a request's time after
its first text divided by its further tokens.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fetch_default_model
import httpx
from bench_report import MAX_TOKEN_ID, random_prompt, report, summary, write
from own_server import serving


@dataclass
class Job:
    """One request of the workload."""

    prompt: list[int]
    max_tokens: int
    arrival_s: float
    """After the start of the run."""


@dataclass
class Outcome:
    """What became of a job; times on the monotonic clock."""

    sent: float
    finished: float = 0.0
    text_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def main() -> None:
    """Run the workload that the command line asks for; print a summary."""
    args, serve_flags = _arguments()
    with _server(args, serve_flags) as url:
        jobs = _jobs(args)
        elapsed, outcomes = asyncio.run(_run(url, args, jobs))
    results = _results(elapsed, outcomes)
    _print(results)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "api_key")}
    write(report("bench_serve", {**settings, "serve_flags": serve_flags}, results), args.json)
    if any(outcome.error for outcome in outcomes):
        raise SystemExit(f"a request failed: {next(o.error for o in outcomes if o.error)}")


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_serve",
        description=(__doc__ or "").split("\n")[0],
        epilog="What follows -- goes to `octavo serve`, when a server is started.",
    )
    parser.add_argument("--url", help="of a running server; without it, one is started and ended again")
    parser.add_argument("--model", help="what to serve, or which served model to ask; default: SmolLM2-135M-Instruct")
    parser.add_argument("--workload", choices=["random", "shared-prefix"], default="random")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens, without the shared prefix")
    parser.add_argument("--output-len", type=int, default=32, help="output tokens of each request")
    parser.add_argument("--length-spread", type=float, default=0.0, help="0.5: lengths from half to one and a half")
    parser.add_argument("--num-prefixes", type=int, default=2, help="shared-prefix: how many different prefixes")
    parser.add_argument("--prefix-len", type=int, default=256, help="shared-prefix: tokens of each prefix")
    parser.add_argument("--request-rate", type=float, help="requests per second, Poisson; default: all at once")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests in flight at a time")
    parser.add_argument("--max-token-id", type=int, default=MAX_TOKEN_ID, help="largest token id in prompts")
    parser.add_argument("--api-key", help="sent as the bearer token")
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--json", metavar="FILE", help="write the full report here")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    if args.url and words[split:]:
        parser.error("flags for `octavo serve` need a server that is started here: leave --url out")
    return args, words[split + 1 :]


@contextlib.contextmanager
def _server(args: argparse.Namespace, serve_flags: list[str]) -> Iterator[str]:
    """Yield the URL of the server; one that was started here is ended on leaving."""
    if args.url:
        yield args.url.rstrip("/")
        return
    with serving(args.model or str(fetch_default_model.fetch()), serve_flags) as (url, _):
        yield url


def _jobs(args: argparse.Namespace) -> list[Job]:
    rng = random.Random(args.seed)
    prefixes: list[list[int]] = [[]]
    if args.workload == "shared-prefix":
        prefixes = [random_prompt(rng, args.prefix_len, args.max_token_id) for _ in range(args.num_prefixes)]

    def length(middle: int) -> int:
        return max(1, round(middle * rng.uniform(1 - args.length_spread, 1 + args.length_spread)))

    jobs, arrival_s = [], 0.0
    for number in range(args.num_prompts):
        suffix = random_prompt(rng, length(args.input_len), args.max_token_id)
        jobs.append(Job(prefixes[number % len(prefixes)] + suffix, length(args.output_len), arrival_s))
        if args.request_rate:
            arrival_s += rng.expovariate(args.request_rate)
    return jobs


async def _run(url: str, args: argparse.Namespace, jobs: list[Job]) -> tuple[float, list[Outcome]]:
    """Send the jobs at their times; return the seconds of the whole run and the outcomes."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = httpx.Limits(max_connections=None)
    gate = asyncio.Semaphore(args.max_concurrency)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()["data"]
        name = args.model if args.url and args.model else models[0]["id"]
        # The first request touches memory and code for the first time; its prompt is nobody else's.
        await _send(client, name, Job([1, 2, 3, 4], 4, 0.0))
        started = time.monotonic()

        async def at_its_time(job: Job) -> Outcome:
            await asyncio.sleep(started + job.arrival_s - time.monotonic())
            async with gate:
                return await _send(client, name, job)

        outcomes = await asyncio.gather(*map(at_its_time, jobs))
        return time.monotonic() - started, outcomes


async def _send(client: httpx.AsyncClient, model: str, job: Job) -> Outcome:
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    outcome = Outcome(sent=time.monotonic())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                outcome.error = (await response.aread()).decode()
                return outcome
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(outcome, json.loads(line.removeprefix("data: ")))
    except httpx.TransportError as error:
        outcome.error = repr(error)
    outcome.finished = time.monotonic()
    return outcome


def _take(outcome: Outcome, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        outcome.error = str(chunk["error"])
    if any(choice["text"] for choice in chunk.get("choices", [])):
        outcome.text_times.append(time.monotonic())
    if usage := chunk.get("usage"):
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _results(elapsed: float, outcomes: list[Outcome]) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if not outcome.error and outcome.text_times]
    output_tokens = sum(outcome.output_tokens for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "elapsed_s": elapsed,
        "requests_per_s": len(good) / elapsed,
        "output_tokens_per_s": output_tokens / elapsed,
        "all_tokens_per_s": (prompt_tokens + output_tokens) / elapsed,
        "cached_share": sum(outcome.cached_tokens for outcome in good) / max(1, prompt_tokens),
        "ttft_ms": summary([1e3 * (o.text_times[0] - o.sent) for o in good]),
        "tpot_ms": summary(
            [1e3 * (o.text_times[-1] - o.text_times[0]) / (o.output_tokens - 1) for o in good if o.output_tokens > 1]
        ),
        "itl_ms": summary([1e3 * (b - a) for o in good for a, b in zip(o.text_times, o.text_times[1:], strict=False)]),
        "request_ms": summary([1e3 * (o.finished - o.sent) for o in good]),
    }


def _print(results: dict[str, Any]) -> None:
    for name, value in results.items():
        if isinstance(value, dict):
            numbers = "  ".join(f"{kind} {number:9.1f}" for kind, number in value.items())
            print(f"{name:>20}  {numbers}")
        else:
            print(f"{name:>20}  {value:,.2f}")


if __name__ == "__main__":
    main()
