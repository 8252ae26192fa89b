"""Ranks that share a model, each with one thread, compared with one process that has as many threads.

Both engines run all the time and take turns, so that other load on the machine affects both. The weights are random;
the sizes are those of Qwen2.5-0.5B without its vocabulary.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench_report import random_prompt, report, write

from octavo import LLM, SamplingParams

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
WORKLOADS = {"one stream": (1, 32, 64), "32 at once": (32, 32, 32), "prefill": (1, 2048, 1)}
"""Number of requests, prompt tokens and output tokens of each workload."""


def main() -> None:
    """Run all workloads in turns and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench_parallel", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, default=2, help="ranks, and threads of the one process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "step_time_target": 0}
        with (
            LLM(folder, num_threads=args.size, **settings) as threads,
            LLM(folder, num_threads=1, tensor_parallel_size=args.size, **settings) as ranks,
        ):
            results = [_compare(name, threads, ranks, args.rounds) for name in WORKLOADS]
    write(report("bench_parallel", {"size": args.size, "rounds": args.rounds}, results), args.json)


def _compare(name: str, threads: LLM, ranks: LLM, rounds: int) -> dict[str, str | float]:
    seconds: dict[str, list[float]] = {"threads": [], "ranks": []}
    for number in range(rounds + 1):
        pairs = [("threads", threads), ("ranks", ranks)]
        for kind, llm in pairs if number % 2 else pairs[::-1]:
            elapsed = _run(llm, WORKLOADS[name], seed=number)
            if number:  # the first round is a warm-up
                seconds[kind].append(elapsed)
    one, many = statistics.median(seconds["threads"]), statistics.median(seconds["ranks"])
    print(f"{name:<12} threads {one:6.2f} s   ranks {many:6.2f} s   speed of ranks {one / many:.2f} x", flush=True)
    return {"workload": name, "threads_s": one, "ranks_s": many, "ratio": one / many}


def _run(llm: LLM, workload: tuple[int, int, int], seed: int) -> float:
    num_requests, input_len, output_len = workload
    rng = random.Random(seed)
    prompts = [random_prompt(rng, input_len, CONFIG["vocab_size"] - 1) for _ in range(num_requests)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
