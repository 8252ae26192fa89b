"""`octavo bench throughput`: sends many prompts at once to `LLM`, with the flags of `vllm bench throughput`."""

import time
from typing import Any

from octavo.frontend.cli.bench.datasets import add_dataset_flags, draw_samples
from octavo.frontend.cli.bench.offline import add_bench_flags, bench_options, bench_parser, show_result
from octavo.frontend.cli.bench.tokenizers import LocalTokenizer
from octavo.frontend.cli.flags import FlagParser


def parser() -> FlagParser:
    """Return the flags of `octavo bench throughput`."""
    parser = bench_parser("throughput", "Run many prompts at once and report the throughput.")
    add_dataset_flags(parser)
    add_bench_flags(parser, {"--n": (1, "outputs for each prompt")})
    return parser


def run(argv: list[str]) -> int:
    """Run the benchmark and print the report; return the exit code.

    Raises:
        StartupError: the engine cannot start.
        CommandError: the workload cannot be created.
    """
    settings, options = bench_options(parser(), argv)
    from octavo import LLM, SamplingParams

    with LLM(**settings) as llm:
        samples = draw_samples(options, LocalTokenizer(llm.client.tokenizer), settings.get("seed", 0))
        params = SamplingParams(n=options.n, temperature=1.0, ignore_eos=True, seed=settings.get("seed", 0))
        # Warm-up: the first requests cause page faults of memory and code.
        llm.generate([sample.prompt[::-1] for sample in samples[:4]], params.clone(max_tokens=8, n=1), use_tqdm=False)
        started = time.monotonic()
        outputs = llm.generate(
            [sample.prompt for sample in samples], [params.clone(max_tokens=sample.max_tokens) for sample in samples]
        )
        elapsed_s = time.monotonic() - started
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    figures: dict[str, Any] = {
        "elapsed_time": elapsed_s,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt_tokens + num_output_tokens,
        "requests_per_second": len(outputs) / elapsed_s,
        "tokens_per_second": (num_prompt_tokens + num_output_tokens) / elapsed_s,
        "output_tokens_per_second": num_output_tokens / elapsed_s,
    }
    show_result(
        "Offline throughput",
        [
            ("Requests", len(outputs)),
            ("Prompt tokens", num_prompt_tokens),
            ("Output tokens", num_output_tokens),
            ("Elapsed (s)", elapsed_s),
            ("Requests/s", figures["requests_per_second"]),
            ("Total tokens/s", figures["tokens_per_second"]),
            ("Output tokens/s", figures["output_tokens_per_second"]),
        ],
        figures,
        settings,
        options,
    )
    return 0
