"""Host time of a decode step on a GPU, from plan to launch and from tokens to result, with kernels replaced by nothing.

Needs no GPU: the worker's executor and runner, over a stream that copies nothing and graphs that launch nothing.

    .venv/bin/python -P scripts/bench_gpu_host.py --requests 1 64 256 1024 [--profile]
"""

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # without a GPU the kernels' modules can be imported, and nothing is launched

import msgspec
import torch
from bench_gpu_parts.shapes import TINY, write_model
from torch import Tensor

from octavo.frontend.model_files.facts import read_model_facts
from octavo.protocol.codec import worker_command_codec, worker_reply_codec
from octavo.protocol.config import resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled, StepPlan
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.runners.cuda_graphs.graphs import StepGraphs
from octavo.worker_proc.runners.cuda_graphs.slot_memory import SlotMemory
from octavo.worker_proc.weights.load import load_model

PROMPT_LEN = 4
BLOCK_SIZE = 16


class Done:
    """An event that is done."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class NoGraph:
    """A graph of no kernels."""

    def replay(self) -> None:
        pass


class NoDevice:
    """A stream that does nothing at once."""

    torch_device = torch.device("cpu")

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, target: Tensor, source: Tensor) -> None:
        pass

    def download(self, source: Tensor) -> Tensor:
        return torch.zeros(source.shape, dtype=source.dtype)

    def record_event(self) -> Done:
        return Done()

    def new_graph_pool(self) -> object:
        return object()

    def capture(self, body: Callable[[], object], pool: object) -> NoGraph:
        return NoGraph()


def open_batch(model: Path, num_requests: int, num_steps: int, sampling: SamplingSpec) -> PipelinedExecutor:
    """Return an executor whose batch has so many requests, with their prompts computed."""
    given = engine_config(
        {
            "model": str(model),
            "device": "cuda",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": num_requests,
            "max_cudagraph_capture_size": num_requests,
        }
    )
    config = resolve(given, read_model_facts(given.model, Env.read()), device="cuda", num_cores=1)
    config = msgspec.structs.replace(config, block_size=BLOCK_SIZE)
    loaded = load_model(config, lambda share: None, device=torch.device("cpu"))
    blocks_each = -(-(PROMPT_LEN + num_steps + 2) // BLOCK_SIZE)
    # Prompts would be computed kernel by kernel; here they are known without that.
    nothing: dict[str, Any] = {
        "_hidden_of": lambda self, views: torch.zeros(views["token_ids"].shape[0], 1),
        "_sampled": lambda self, views, logits: torch.zeros(views["sample_slots"].shape[0], dtype=torch.int64),
        "logits_of": lambda self, rows: torch.zeros(rows.shape[0], 1),
    }
    for name, function in nothing.items():
        setattr(StepGraphs, name, function)
    SlotMemory.apply = lambda self, places, words: None  # type: ignore[method-assign]
    loaded.logits = lambda hidden: hidden  # type: ignore[method-assign]
    executor = open_executor(
        loaded,
        config,
        NoDevice(),
        worker_reply_codec().encode,
        num_blocks=[blocks_each * num_requests],
        max_model_len=blocks_each * BLOCK_SIZE,
    )
    executor.prepare()
    admitted = [
        Admitted(slot, f"{slot}", pack_ids([5] * PROMPT_LEN), PROMPT_LEN, [blocks_of(slot, blocks_each)], sampling)
        for slot in range(num_requests)
    ]
    executor.begin(StepPlan(0, [], admitted, [], [Scheduled(slot, 0, PROMPT_LEN, 1) for slot in range(num_requests)]))
    executor.drain()
    return executor


def blocks_of(slot: int, blocks_each: int) -> list[int]:
    """Return the blocks of a request."""
    return list(range(slot * blocks_each, (slot + 1) * blocks_each))


def step_times(executor: PipelinedExecutor, num_requests: int, num_steps: int) -> list[float]:
    """Return the seconds of each step: its plan is decoded and begun, and the result of an earlier step is encoded."""
    commands = worker_command_codec()
    times = []
    for step in range(num_steps):
        scheduled = [Scheduled(slot, PROMPT_LEN + step, 1, 1) for slot in range(num_requests)]
        frames = commands.encode(StepPlan(step + 1, [], [], [], scheduled))
        started = time.perf_counter()
        executor.begin(commands.decode(*frames))
        executor.deliver_results()
        times.append(time.perf_counter() - started)
    executor.drain()
    return times


def main() -> None:
    """Print the time of a step for each number of requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = write_model(TINY, Path(tempfile.mkdtemp(prefix="bench_gpu_host-")))
    sampling = SamplingSpec(max_tokens=1000, seed=0, temperature=0.6, top_k=20, top_p=0.95)
    for num_requests in args.requests:
        executor = open_batch(model, num_requests, args.steps, sampling)
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        times = step_times(executor, num_requests, args.steps)
        profile.disable()
        executor.close()
        quick = statistics.quantiles(times, n=10)[0]
        median = statistics.median(times)
        print(f"{num_requests:5} requests: best tenth {1e3 * quick:.3f} ms, median {1e3 * median:.3f} ms")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
