"""Offline throughput through `octavo.LLM`. bench_serve measures latencies.

There are three workloads. `fixed`: prompts and outputs of one length for each batch size; run once for one token and
once for all tokens, to separate prefill from decode. `mixed`: many prompts of random lengths at once, as in comparisons
of engines. `beside`: the cost of decode steps outside the worker for each batch size: the time between two steps, and
the processor time of frontend and core.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import fetch_default_model
from bench_report import MAX_TOKEN_ID, random_prompt, report, write

from octavo import LLM, SamplingParams


def main() -> None:
    """Run the selected workload and print a table."""
    args = _arguments()
    model = args.model or str(fetch_default_model.fetch())
    settings = dict(_setting(text) for text in args.engine)
    started = time.perf_counter()
    with LLM(model=model, **settings) as llm:
        print(f"engine ready after {time.perf_counter() - started:.1f} s", flush=True)
        # Warm-up: the first requests fault in memory and code.
        _generate(llm, args, [32] * 4, [8] * 4)
        results = {"fixed": _fixed, "mixed": _mixed, "beside": _beside}[args.workload](llm, args)
    write(report("bench_offline", {"model": model, **settings}, results), args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_offline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--workload", choices=["fixed", "mixed", "beside"], default="fixed")
    parser.add_argument("--batch-sizes", default="1,4,16", help="fixed, beside: prompts at once, one run for each")
    parser.add_argument("--num-prompts", type=int, default=64, help="mixed: number of prompts")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens; mixed: at most")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens; mixed: at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-token-id", type=int, default=MAX_TOKEN_ID, help="largest token id in prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="an engine setting")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    return parser.parse_args()


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _generate(llm: LLM, args: argparse.Namespace, input_lens: list[int], output_lens: list[int]) -> float:
    """Generate exactly the given numbers of tokens for new random prompts; return the seconds."""
    # A different seed for each run: repeated prompts would hit the prefix cache.
    args.seed += 1
    rng = random.Random(args.seed)
    prompts = [random_prompt(rng, length, args.max_token_id) for length in input_lens]
    shared = SamplingParams(temperature=args.temperature, ignore_eos=True, seed=args.seed, detokenize=False)
    params = [shared.clone(max_tokens=length) for length in output_lens]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == output_lens
    return elapsed


def _fixed(llm: LLM, args: argparse.Namespace) -> list[dict[str, float]]:
    results = []
    print(f"{'batch':>6} {'prefill tok/s':>14} {'decode tok/s':>13} {'ms per step':>12} {'total s':>8}")
    for batch in map(int, args.batch_sizes.split(",")):
        lens = [args.input_len] * batch
        prefill_s = _generate(llm, args, lens, [1] * batch)
        total_s = _generate(llm, args, lens, [args.output_len] * batch)
        num_decodes = args.output_len - 1
        decode_s = total_s - prefill_s
        row = {
            "batch": batch,
            "prefill_tokens_per_s": batch * args.input_len / prefill_s,
            "decode_tokens_per_s": batch * num_decodes / decode_s,
            "decode_step_ms": 1e3 * decode_s / num_decodes,
            "total_s": total_s,
        }
        results.append(row)
        print("{:6d} {:14.1f} {:13.1f} {:12.1f} {:8.2f}".format(*row.values()), flush=True)
    return results


def _beside(llm: LLM, args: argparse.Namespace) -> list[dict[str, float]]:
    results = []
    print("Milliseconds per plan, median of 5 runs; the processor times are of all threads together.")
    print(f"{'batch':>6} {'in the worker':>14} {'between':>8} {'frontend cpu':>13} {'core cpu':>9}")
    for batch in map(int, args.batch_sizes.split(",")):
        runs = [_steps_of(llm, args, batch) for _ in range(5)]
        row = {"batch": batch, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}}
        results.append(row)
        print("{:6d} {:14.3f} {:8.3f} {:13.3f} {:9.3f}".format(*row.values()), flush=True)
    return results


def _steps_of(llm: LLM, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Return the means over the plans of one run, prefill included. A plan may have several decode steps."""
    earlier, used_s = llm.snapshot().steps, _processor_seconds(llm)
    newest = earlier[-1].sequence if earlier else -1
    elapsed_s = _generate(llm, args, [args.input_len] * batch, [args.output_len] * batch)
    used_s = [after - before for before, after in zip(used_s, _processor_seconds(llm), strict=True)]
    latest = llm.snapshot().steps
    steps = [step.elapsed_s for step in latest if step.sequence > newest]
    if len(steps) < latest[-1].sequence - newest:
        raise SystemExit(f"the engine remembers {len(steps)} steps: ask for a shorter --output-len")
    names = ("worker_ms", "between_ms", "frontend_cpu_ms", "core_cpu_ms")
    values = (sum(steps), elapsed_s - sum(steps), *used_s)
    return {name: 1e3 * value / len(steps) for name, value in zip(names, values, strict=True)}


def _processor_seconds(llm: LLM) -> list[float]:
    """Return the processor time of this process, the frontend, and of its core."""
    engine = llm.client.engine
    assert engine is not None
    seconds = []
    for pid in (os.getpid(), engine.core_pid):
        # In nanoseconds; /proc/PID/stat counts in hundredths of a second.
        tasks = Path(f"/proc/{pid}/task").iterdir()
        seconds.append(sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9)
    return seconds


def _mixed(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(args.seed)
    input_lens = [rng.randint(max(1, args.input_len // 8), args.input_len) for _ in range(args.num_prompts)]
    output_lens = [rng.randint(max(1, args.output_len // 8), args.output_len) for _ in range(args.num_prompts)]
    elapsed = _generate(llm, args, input_lens, output_lens)
    result = {
        "num_prompts": args.num_prompts,
        "prompt_tokens": sum(input_lens),
        "output_tokens": sum(output_lens),
        "elapsed_s": elapsed,
        "output_tokens_per_s": sum(output_lens) / elapsed,
        "all_tokens_per_s": (sum(input_lens) + sum(output_lens)) / elapsed,
    }
    for name, value in result.items():
        print(f"{name:>20}  {value:,.1f}")
    return result


if __name__ == "__main__":
    main()
