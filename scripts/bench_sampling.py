"""Time of sampling by kind of request and number of rows: native kernels and torch, on the same logits.

The logits are normally distributed. With a spread of 4, a few tokens have most of the probability, as in a trained
model; with 1, the nucleus has tens of thousands of tokens, the worst case. Native and torch runs take turns; the best
of each counts.

    .venv/bin/python -P scripts/bench_sampling.py --rows 1 32 --vocab-size 49152
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.native.library import load
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.sampling.sampler import Draw, Sampler
from octavo.worker_proc.sampling.state import SamplingState

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "all penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "logprobs 5": {"logprobs": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--spreads", nargs="+", type=float, default=[4.0, 1.0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    samplers = {"native": Sampler(options.vocab_size, load(), options.threads)}
    if not options.no_torch:
        samplers["torch"] = Sampler(options.vocab_size)
    print(f"vocabulary {options.vocab_size}, {options.threads} threads, best of {options.runs} runs, milliseconds")
    print(f"{'rows':>5} {'spread':>6}  {'kind':20}", *(f"{name:>9}" for name in samplers))
    for rows in options.rows:
        for spread in options.spreads:
            logits = spread * torch.randn(rows, options.vocab_size, generator=torch.Generator().manual_seed(rows))
            for kind, fields in KINDS.items():
                calls = [call_of(sampler, logits, fields) for sampler in samplers.values()]
                times = best_ms(calls, options.runs)
                print(f"{rows:5} {spread:6}  {kind:20}", *(f"{ms:9.3f}" for ms in times), flush=True)


def call_of(sampler: Sampler, logits: torch.Tensor, fields: dict[str, Any]) -> Callable[[], object]:
    """Return a call that samples one step. The requests have seen 500 tokens and differ only in their seeds."""
    draws = []
    for seed in range(len(logits)):
        spec = SamplingSpec(max_tokens=1000, seed=seed, **fields)
        state = SamplingState.prepare(spec, list(range(400)), list(range(300, 500)), logits.shape[1])
        draws.append(Draw(state, position=600, num_outputs=200))
    if "logprobs" not in fields:
        return lambda: sampler.sample(logits, draws)
    return lambda: sampler.logprobs(logits, sampler.sample(logits, draws), [fields["logprobs"]] * len(draws))


def best_ms(calls: list[Callable[[], object]], runs: int) -> list[float]:
    """Make the calls in turns; return the shortest time of each."""
    best = [float("inf")] * len(calls)
    for _ in range(runs + 1):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], 1e3 * (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    main()
