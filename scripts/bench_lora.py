"""Cost of LoRA adapters on a CPU: decodes and a prompt with adapters on all linear layers, and the model alone.

One process holds the model twice, with and without slots for adapters, and measures both in turn, so the ratios compare
the same minutes. The time does not depend on the values of weights and adapters.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import fetch_default_model
import numpy as np
import torch
from bench_report import report, write
from profile_step import NUM_BLOCKS, Case

from octavo.frontend.model_files.facts import read_model_facts
from octavo.kernels.lora.shape import LoraPart
from octavo.kernels.native.library import load
from octavo.protocol.config import ResolvedConfig, resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.worker_proc.batch.inputs import AdapterInputs, StepInputs
from octavo.worker_proc.lora.slots import AdapterSlots, PlacedAdapter
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.native.open import build_programs
from octavo.worker_proc.runners.native.programs import NativePrograms
from octavo.worker_proc.weights.load import load_model


@dataclass(frozen=True)
class Row:
    """Requests with a number of adapters, and the lowest acceptable fraction of the model's own speed."""

    case: str
    num_adapters: int
    target: float | None


ROWS = (Row("32x1@512", 8, 0.85), Row("1x1@512", 1, 0.92), Row("8x1@512", 8, None), Row("1x512@512", 1, None))


def main() -> None:
    """Measure all rows and print a line for each."""
    args = _arguments()
    cases = [Case.parse(row.case) for row in ROWS]
    config = _config(args, cases)
    assert config.lora is not None
    alone = _programs(_load(config), config, cases)
    model = _load(config)
    slots = AdapterSlots(model, config.lora)
    for slot in range(config.lora.max_loras):
        slots.put(slot, _adapter(model, args.rank, slot))
    adapted = _programs(model, config, cases)
    results = []
    for row, case in zip(ROWS, cases, strict=True):
        inputs = case.inputs(model, config.block_size)
        with_adapters = case.inputs(model, config.block_size)
        of_requests = np.arange(case.num_requests) % row.num_adapters
        with_adapters.adapters = AdapterInputs(np.repeat(of_requests, case.num_tokens), config.lora.max_loras)
        times = np.array(
            [
                [_seconds(alone, inputs), _seconds(adapted, with_adapters), _seconds(adapted, inputs)]
                for _ in range(args.runs)
            ]
        )
        base_s, lora_s, idle_s = (statistics.median(column) for column in times.T.tolist())
        ratio = base_s / lora_s
        verdict = "" if row.target is None else f", target {row.target}: {'met' if ratio >= row.target else 'MISSED'}"
        print(
            f"{row.case:10} {row.num_adapters} adapters of rank {args.rank}: {lora_s * 1e3:8.2f} ms, alone "
            f"{base_s * 1e3:8.2f} ms: {ratio:.3f} of the speed{verdict}; without adapters in the step "
            f"{base_s / idle_s:.3f}",
            flush=True,
        )
        results.append({"case": row.case, "adapters": row.num_adapters, "alone_s": base_s, "with_s": lora_s})
    settings = {"model": config.model.model_path, "quantization": config.quantization, "rank": args.rank}
    write(report("bench_lora", settings, results), args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_lora", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="quantization at load, as in octavo serve")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--runs", type=int, default=15, help="number of runs of each row; the median counts")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    return parser.parse_args()


def _config(args: argparse.Namespace, cases: list[Case]) -> ResolvedConfig:
    user_config = engine_config(
        {
            "model": args.model or str(fetch_default_model.fetch()),
            "load_format": args.load_format,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "max_num_seqs": max(case.num_requests for case in cases),
            "max_num_batched_tokens": max(case.num_requests * case.num_tokens for case in cases),
            "enable_lora": True,
            "max_loras": max(row.num_adapters for row in ROWS),
            "max_lora_rank": args.rank,
        }
    )
    return resolve(user_config, read_model_facts(user_config.model, Env.read()), device="cpu", num_cores=2)


def _load(config: ResolvedConfig) -> Model:
    return load_model(config, lambda fraction: None, library=load())


def _programs(model: Model, config: ResolvedConfig, cases: list[Case]) -> NativePrograms:
    longest = max(case.context_len for case in cases)
    return build_programs(model, config, num_blocks=NUM_BLOCKS, max_model_len=longest, min_logits=1)


def _adapter(model: Model, rank: int, seed: int) -> PlacedAdapter:
    """Return an adapter of all linear layers except the output layer, like peft's `all-linear`."""
    noise = torch.Generator().manual_seed(seed)
    return {
        layer: [
            LoraPart(
                torch.randn(rank, layer.num_inputs, generator=noise) * 0.01,
                torch.randn(outputs, rank, generator=noise) * 0.01,
                2.0,
            )
            for outputs in layer.parts.values()
        ]
        for layer in model.parameters.adaptable
        if not layer.is_table and "lm_head" not in layer.parts
    }


def _seconds(forward: NativePrograms, inputs: StepInputs) -> float:
    start_s = time.perf_counter()
    forward.run(inputs)
    forward.logits(inputs.query_starts[1:] - 1)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
