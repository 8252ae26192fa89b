"""Where the time of a step goes, by operation, in native programs: a decode of many requests, a prefill chunk.

Runs a worker's programs without a core or a frontend: one process, real weights, random tokens and scattered
blocks. The times are the first thread's, its waiting for the others included, of the fastest of several runs.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import fetch_default_model
import numpy as np
from bench_report import report, write

from octavo.frontend.model_files.facts import read_model_facts
from octavo.kernels.native.library import load
from octavo.protocol.config import ResolvedConfig, resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.worker_proc.batch.inputs import GroupInputs, StateInputs, StepInputs
from octavo.worker_proc.batch.step_arguments import step_arguments
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.native.open import build_programs
from octavo.worker_proc.runners.native.programs import NativePrograms
from octavo.worker_proc.weights.load import load_model

NUM_BLOCKS = 8192
BAR_WIDTH = 40
CASES = "1x1@512,8x1@512,32x1@512,64x1@512,1x512@512,1x512@2048"


@dataclass(frozen=True)
class Case:
    """Equal requests of one step."""

    num_requests: int
    num_tokens: int
    """Tokens computed for each request."""
    context_len: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read "32x1@512": 32 requests, one token each, 512 keys."""
        requests, _, rest = text.partition("x")
        tokens, _, context = rest.partition("@")
        return cls(int(requests), int(tokens), int(context))

    def inputs(self, model: Model, block_size: int, seed: int = 0) -> StepInputs:
        """Return the arrays of a step of the model; a request's recurrent state is in the slot of its number.

        The tables of all cache groups together have `NUM_BLOCKS` blocks.
        """
        rng = np.random.default_rng(seed)
        num_blocks, num_groups = -(-self.context_len // block_size), len(model.cache_groups)
        order = rng.permutation(NUM_BLOCKS)[: num_groups * self.num_requests * num_blocks].astype(np.int32)
        positions = np.arange(self.context_len - self.num_tokens, self.context_len)
        groups = []
        for table in order.reshape(num_groups, self.num_requests, num_blocks):
            slots = table[:, positions // block_size].astype(np.int64) * block_size + positions % block_size
            groups.append(GroupInputs(slots.ravel(), table))
        num_rows = self.num_requests * self.num_tokens
        own_slots = np.arange(self.num_requests, dtype=np.int32)
        sources = own_slots if self.context_len > self.num_tokens else np.full_like(own_slots, -1)
        return StepInputs(
            token_ids_T=rng.integers(0, 1000, num_rows),
            positions_T=np.tile(positions, self.num_requests),
            query_starts=np.arange(0, num_rows + 1, self.num_tokens),
            context_lens=np.full(self.num_requests, self.context_len),
            slots_T=np.repeat(np.arange(self.num_requests), self.num_tokens),
            groups=tuple(groups),
            states=StateInputs(sources, own_slots) if model.state_group else None,
        )


def main() -> None:
    """Profile the cases of the command line and print a bar for each operation."""
    args = _arguments()
    cases = [Case.parse(text) for text in args.cases.split(",")]
    config = _config(args, cases)
    model = load_model(config, lambda fraction: None, library=load(args.level), cache_dir=Env.read().cache_dir)
    longest = max(case.context_len for case in cases)
    num_states = max(case.num_requests for case in cases)
    forward = build_programs(
        model, config, num_blocks=NUM_BLOCKS, max_model_len=longest, num_states=num_states, min_logits=1
    )
    results = [_profile(forward, case.inputs(model, config.block_size), case, config, args.runs) for case in cases]
    settings = {"model": config.model.model_path, "quantization": config.quantization, "threads": config.num_threads}
    write(report("profile_step", settings, results), args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/profile_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="see the flag of the server")
    parser.add_argument("--level", help="instruction set, such as avx512_bf16; default: the best")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-threads", type=int, help="default: as many as there are cores")
    parser.add_argument("--cases", default=CASES, help=f"requests x tokens @ context, by commas; default: {CASES}")
    parser.add_argument("--runs", type=int, default=15, help="of each case; the fastest counts")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    return parser.parse_args()


def _config(args: argparse.Namespace, cases: list[Case]) -> ResolvedConfig:
    user_config = engine_config(
        {
            "model": args.model or str(fetch_default_model.fetch()),
            "load_format": args.load_format,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "kv_cache_dtype": args.kv_cache_dtype,
            "num_threads": args.num_threads,
            "max_num_seqs": max(case.num_requests for case in cases),
            "max_num_batched_tokens": max(case.num_requests * case.num_tokens for case in cases),
        }
    )
    return resolve(user_config, read_model_facts(user_config.model, Env.read()), device="cpu", num_cores=2)


def _profile(
    forward: NativePrograms, inputs: StepInputs, case: Case, config: ResolvedConfig, runs: int
) -> dict[str, Any]:
    fastest, best_s, head_s = [], float("inf"), float("inf")
    for _ in range(runs):
        start_s = time.perf_counter()
        nanoseconds = forward.layers.measure(step_arguments(inputs), config.num_threads)
        middle_s = time.perf_counter()
        forward.logits(inputs.query_starts[1:] - 1)
        if middle_s - start_s < best_s:
            fastest, best_s = nanoseconds, middle_s - start_s
        head_s = min(head_s, time.perf_counter() - middle_s)
    milliseconds = {"logits": head_s * 1e3}
    for name, value in _by_operation(forward, fastest).items():
        milliseconds[name] = value / 1e6
    total_ms = (best_s + head_s) * 1e3
    print(
        f"{case.num_requests} requests, {case.num_tokens} tokens each, {case.context_len} keys: {total_ms:.2f} ms, "
        f"{case.num_requests * case.num_tokens / total_ms * 1e3:.0f} tokens/s"
    )
    for name, value in sorted(milliseconds.items(), key=lambda item: -item[1]):
        if value > total_ms / 500:
            print(f"  {name:16} {value:8.2f} ms {value / total_ms:5.1%} {'#' * round(value / total_ms * BAR_WIDTH)}")
    return {"case": vars(case), "total_ms": total_ms, "operations_ms": milliseconds}


def _by_operation(forward: NativePrograms, nanoseconds: list[int]) -> Counter[str]:
    """Return the total time by the name of the operation."""
    total: Counter[str] = Counter()
    for name, value in zip(forward.layers.operations, nanoseconds, strict=True):
        total[name] += value
    return total


if __name__ == "__main__":
    main()
