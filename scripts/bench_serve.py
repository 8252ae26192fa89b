"""Benchmarks a running server, or one that it starts: throughput, TTFT, TPOT and ITL.

It uses the OpenAI completions API with prompts of token ids. Load and latencies are those of `octavo bench serve`: TTFT
is the time to the first text, ITL the time between two pieces of text, TPOT the mean time per token after the first.
"""

import argparse
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
from bench_report import MAX_TOKEN_ID, random_prompt, report, summary, write
from own_server import parse_arguments, server_of

from octavo.frontend.cli.bench.figures import Outcome
from octavo.frontend.cli.bench.load import Target, measure


@dataclass
class TimedPrompt:
    """One request of the workload."""

    prompt: list[int]
    max_tokens: int
    arrival_s: float
    """Seconds after the start of the run."""


def main() -> None:
    """Run the selected workload and print a summary."""
    args, serve_flags = _arguments()
    with server_of(args, serve_flags) as url:
        prompts = _timed_prompts(args)
        elapsed, outcomes = _measure(url, args, prompts)
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
    )
    parser.add_argument("--workload", choices=["random", "shared-prefix"], default="random")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens, without the shared prefix")
    parser.add_argument("--output-len", type=int, default=32, help="output tokens of each request")
    parser.add_argument(
        "--length-spread",
        type=float,
        default=0.0,
        help="relative spread of lengths; 0.5: from half to one and a half times",
    )
    parser.add_argument("--num-prefixes", type=int, default=2, help="shared-prefix: number of prefixes")
    parser.add_argument("--prefix-len", type=int, default=256, help="shared-prefix: tokens of each prefix")
    parser.add_argument("--request-rate", type=float, help="requests per second, Poisson; default: all at once")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests in flight at a time")
    parser.add_argument("--max-token-id", type=int, default=MAX_TOKEN_ID, help="largest token id in prompts")
    parser.add_argument("--api-key", help="API key, sent as the bearer token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    return parse_arguments(parser)


def _timed_prompts(args: argparse.Namespace) -> list[TimedPrompt]:
    rng = random.Random(args.seed)
    prefixes: list[list[int]] = [[]]
    if args.workload == "shared-prefix":
        prefixes = [random_prompt(rng, args.prefix_len, args.max_token_id) for _ in range(args.num_prefixes)]

    def length(middle: int) -> int:
        return max(1, round(middle * rng.uniform(1 - args.length_spread, 1 + args.length_spread)))

    prompts, arrival_s = [], 0.0
    for number in range(args.num_prompts):
        suffix = random_prompt(rng, length(args.input_len), args.max_token_id)
        prompts.append(TimedPrompt(prefixes[number % len(prefixes)] + suffix, length(args.output_len), arrival_s))
        if args.request_rate:
            arrival_s += rng.expovariate(args.request_rate)
    return prompts


def _measure(url: str, args: argparse.Namespace, prompts: list[TimedPrompt]) -> tuple[float, list[Outcome]]:
    """Send the prompts at their arrival times; return the duration in seconds and the outcomes."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    models = httpx.get(f"{url}/v1/models", headers=headers).raise_for_status().json()["data"]
    name = args.model if args.url and args.model else models[0]["id"]
    # Warm-up: the first request faults in memory and code. Its prompt shares no prefix.
    warmup = _body(name, TimedPrompt([1, 2, 3, 4], 4, 0.0))
    return measure(
        Target(url, "/v1/completions", headers),
        [_body(name, prompt) for prompt in prompts],
        [warmup],
        [prompt.arrival_s for prompt in prompts],
        args.max_concurrency,
        has_bar=False,
    )


def _body(model: str, prompt: TimedPrompt) -> bytes:
    body = {
        "model": model,
        "prompt": prompt.prompt,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def _results(elapsed: float, outcomes: list[Outcome]) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if not outcome.error]
    output_tokens = sum(outcome.num_output_tokens for outcome in good)
    prompt_tokens = sum(outcome.num_prompt_tokens for outcome in good)
    latencies = [outcome.latencies() for outcome in good]

    def all_of(metric: str) -> list[float]:
        return [value for each in latencies for value in each[metric]]

    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "elapsed_s": elapsed,
        "requests_per_s": len(good) / elapsed,
        "output_tokens_per_s": output_tokens / elapsed,
        "all_tokens_per_s": (prompt_tokens + output_tokens) / elapsed,
        "cached_share": sum(outcome.num_cached_tokens for outcome in good) / max(1, prompt_tokens),
        "ttft_ms": summary(all_of("ttft")),
        "tpot_ms": summary(all_of("tpot")),
        "itl_ms": summary(all_of("itl")),
        "request_ms": summary(all_of("e2el")),
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
