"""`octavo bench latency`: runs one batch after another through `LLM`, with the flags of `vllm bench latency`."""

import random
import statistics
import time
from typing import Any

from octavo.frontend.cli.bench.figures import percentile
from octavo.frontend.cli.bench.offline import add_bench_flags, bench_options, bench_parser, show_result
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.flags import FlagParser

PERCENTS = (10, 25, 50, 75, 90, 99)

FIRST_PLAIN_TOKEN = 300
"""Token ids below this are special and byte tokens in most vocabularies."""


def parser() -> FlagParser:
    """Return the flags of `octavo bench latency`."""
    parser = bench_parser("latency", "Run one batch after another and report the latency of each.")
    numbers = {
        "--batch-size": (8, "prompts in each batch"),
        "--input-len": (32, "prompt tokens"),
        "--output-len": (128, "output tokens"),
        "--n": (1, "outputs for each prompt"),
        "--num-iters-warmup": (10, "batches before the clock starts"),
        "--num-iters": (30, "batches that are measured"),
    }
    add_bench_flags(parser, numbers)
    return parser


def run(argv: list[str]) -> int:
    """Run the benchmark and print the report; return the exit code.

    Raises:
        StartupError: the engine cannot start.
        CommandError: a number is too small.
    """
    settings, options = bench_options(parser(), argv)
    if min(options.batch_size, options.input_len, options.output_len, options.n, options.num_iters) < 1:
        raise CommandError("batch, lengths, n and iterations must be 1 or more")
    from octavo import LLM, SamplingParams

    seed = settings.get("seed", 0)
    rng = random.Random(seed)
    params = SamplingParams(
        n=options.n, temperature=1.0, ignore_eos=True, max_tokens=options.output_len, seed=seed, detokenize=False
    )
    times_s = []
    with LLM(**settings) as llm:
        token_ids = range(min(FIRST_PLAIN_TOKEN, llm.client.facts.vocab_size // 2), llm.client.facts.vocab_size)
        for number in range(options.num_iters_warmup + options.num_iters):
            # Each batch has new prompts: repeated ones would hit the prefix cache.
            prompts = [rng.choices(token_ids, k=options.input_len) for _ in range(options.batch_size)]
            started = time.monotonic()
            llm.generate(prompts, params, use_tqdm=False)
            if number >= options.num_iters_warmup:
                times_s.append(time.monotonic() - started)
    figures: dict[str, Any] = {
        "avg_latency": statistics.fmean(times_s),
        "latencies": times_s,
        "percentiles": {str(percent): percentile(times_s, percent) for percent in PERCENTS},
    }
    rows: list[tuple[str, int | float | str]] = [
        ("Batches", len(times_s)),
        ("Mean latency (ms)", 1e3 * figures["avg_latency"]),
        *((f"P{percent} latency (ms)", 1e3 * figures["percentiles"][str(percent)]) for percent in PERCENTS),
        ("Mean time per output token (ms)", 1e3 * figures["avg_latency"] / options.output_len),
    ]
    show_result("Latency of a batch", rows, figures, settings, options)
    return 0
