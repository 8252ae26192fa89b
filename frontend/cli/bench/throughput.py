"""`octavo bench throughput`: many prompts at once through `LLM`, with the flags of `vllm bench throughput`."""

import time
from typing import Any

from octavo.frontend.cli.bench.datasets import add_dataset_flags, make_jobs
from octavo.frontend.cli.bench.offline import bench_options
from octavo.frontend.cli.bench.report import context, say_table, write_json
from octavo.frontend.cli.bench.tokenizers import LocalTokenizer
from octavo.frontend.cli.flags import FlagParser, config_parser


def parser() -> FlagParser:
    """Return the flags of `octavo bench throughput`."""
    parser = config_parser(
        "octavo bench throughput", "Give an engine many prompts at once and tell its throughput.", has_server=False
    )
    add_dataset_flags(parser)
    group = parser.add_named_group("bench", "The measurement")
    group.add_argument("--n", type=int, default=1, metavar="N", help="outputs for each prompt; default: 1")
    group.add_argument("--output-json", metavar="FILE", help="write the figures here")
    return parser


def run(words: list[str]) -> int:
    """Measure and tell; return the exit code.

    Raises:
        StartupError: the engine cannot start.
        CommandError: the workload cannot be made.
    """
    settings, options = bench_options(parser(), words)
    from octavo import LLM, SamplingParams

    with LLM(**settings) as llm:
        jobs = make_jobs(options, LocalTokenizer(llm.client.tokenizer), settings.get("seed", 0))
        params = SamplingParams(n=options.n, temperature=1.0, ignore_eos=True, seed=settings.get("seed", 0))
        # The first requests touch memory and code for the first time.
        llm.generate([job.prompt[::-1] for job in jobs[:4]], params.clone(max_tokens=8, n=1), use_tqdm=False)
        started = time.monotonic()
        outputs = llm.generate([job.prompt for job in jobs], [params.clone(max_tokens=job.max_tokens) for job in jobs])
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
    say_table(
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
    )
    if options.output_json:
        write_json(options.output_json, {**context(), "model_id": settings["model"], **figures})
    return 0
