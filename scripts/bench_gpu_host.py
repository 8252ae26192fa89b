"""Host time of a step on a GPU, from plan to launch and from tokens to result, with kernels replaced by nothing.

Needs no GPU: the worker's executor and runner, over a stream that copies nothing and graphs that launch nothing.

    .venv/bin/python -P scripts/bench_gpu_host.py --requests 1 64 256 1024 --prompts 0 512 [--profile]

With `--prompts` each step also computes a prompt of that many tokens. Its request arrives with the step and is finished
by the next one. Steps without a graph are rejected: they would launch their kernels one by one.
"""

import argparse
import cProfile
import itertools
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # the kernels' modules can be imported without a GPU; nothing is launched

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
from octavo.worker_proc.runners.cuda_graphs.logprobs import LogprobReporter
from octavo.worker_proc.runners.cuda_graphs.slot_memory import SlotMemory
from octavo.worker_proc.weights.load import load_model

PROMPT_LEN = 4
BLOCK_SIZE = 16


class Done:
    """An event that has already happened."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: object) -> float:
        return 0.0


class NoGraph:
    """A graph without kernels."""

    num_replays = 0
    """Number of replays of all graphs."""

    def replay(self) -> None:
        NoGraph.num_replays += 1


class NoDevice:
    """A stream that does nothing and has always finished."""

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


@dataclass(frozen=True)
class Cell:
    """The work of each step."""

    num_requests: int
    """Number of requests that decode."""
    prompt_tokens: int
    """Tokens of the prompt of one further request; 0 if no prompt is computed."""


def open_batch(model: Path, cell: Cell, num_steps: int, sampling: SamplingSpec) -> PipelinedExecutor:
    """Return an executor with a batch of decoding requests whose prompts are computed."""
    num_slots = cell.num_requests + 2
    given = engine_config(
        {
            "model": str(model),
            "device": "cuda",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": num_slots,
            "max_num_batched_tokens": max(2048, PROMPT_LEN * num_slots),
            "max_cudagraph_capture_size": num_slots,
        }
    )
    config = resolve(given, read_model_facts(given.model, Env.read()), device="cuda", num_cores=1)
    config = msgspec.structs.replace(config, block_size=BLOCK_SIZE)
    loaded = load_model(config, lambda share: None, device=torch.device("cpu"))
    blocks_each = -(-max(PROMPT_LEN + num_steps + 2, cell.prompt_tokens) // BLOCK_SIZE)
    loaded.logits = lambda hidden: hidden  # type: ignore[method-assign]
    executor = open_executor(
        loaded,
        config,
        NoDevice(),
        worker_reply_codec().encode,
        num_blocks=blocks_each * num_slots,
        max_model_len=blocks_each * BLOCK_SIZE,
    )
    executor.warm_up()
    admitted = [new_request(slot, PROMPT_LEN, blocks_each, sampling) for slot in range(cell.num_requests)]
    scheduled = [Scheduled(slot, 0, PROMPT_LEN, 1) for slot in range(cell.num_requests)]
    executor.begin(StepPlan(0, [], admitted, [], scheduled))
    executor.drain()
    return executor


def launch_nothing() -> None:
    """Replace the computation of graphs and the launches outside of graphs."""
    nothing: dict[str, Any] = {
        "_hidden_of": lambda self, views, *others: torch.zeros(views["token_ids"].shape[0], 1),
        "_sampled": lambda self, views, *others: views["sample_slots"],
        "logits_of": lambda self, rows: torch.zeros(rows.shape[0], 1),
    }
    for name, function in nothing.items():
        setattr(StepGraphs, name, function)
    LogprobReporter.warm_up = lambda self, table: None  # type: ignore[method-assign]
    SlotMemory.apply = lambda self, places, words: None  # type: ignore[method-assign]


def new_request(slot: int, num_tokens: int, blocks_each: int, sampling: SamplingSpec) -> Admitted:
    """Return a request whose prompt has not been computed."""
    return Admitted(slot, f"{slot}", pack_ids([5] * num_tokens), num_tokens, [blocks_of(slot, blocks_each)], sampling)


def blocks_of(slot: int, blocks_each: int) -> list[int]:
    """Return the blocks of a request."""
    return list(range(slot * blocks_each, (slot + 1) * blocks_each))


def step_plan(cell: Cell, step: int, sampling: SamplingSpec) -> StepPlan:
    """Return the plan of a step, counted from 0."""
    scheduled = [Scheduled(slot, PROMPT_LEN + step, 1, 1) for slot in range(cell.num_requests)]
    if not cell.prompt_tokens:
        return StepPlan(step + 1, [], [], [], scheduled)
    slot, blocks_each = cell.num_requests + step % 2, -(-cell.prompt_tokens // BLOCK_SIZE)
    released = [cell.num_requests + (step - 1) % 2] if step else []
    admitted = [new_request(slot, cell.prompt_tokens, blocks_each, sampling)]
    scheduled.append(Scheduled(slot, 0, cell.prompt_tokens, 1))
    return StepPlan(step + 1, released, admitted, [], scheduled)


def step_times(executor: PipelinedExecutor, cell: Cell, num_steps: int, sampling: SamplingSpec) -> list[float]:
    """Return the seconds of each step: decode and begin its plan, and encode the result of an earlier step."""
    commands = worker_command_codec()
    times = []
    num_replays = NoGraph.num_replays
    for step in range(num_steps):
        frames = commands.encode(step_plan(cell, step, sampling))
        started = time.perf_counter()
        executor.begin(commands.decode(*frames))
        executor.deliver_results()
        times.append(time.perf_counter() - started)
    executor.drain()
    if NoGraph.num_replays - num_replays != 2 * num_steps:
        raise SystemExit(f"{cell}: some steps have no graph, so their launches are not measured")
    return times


def main() -> None:
    """Print the time of a step for each number of requests and of prompt tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[0], help="tokens of a prompt that is computed with the decodes"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    launch_nothing()
    model = write_model(TINY, Path(tempfile.mkdtemp(prefix="bench_gpu_host-")))
    sampling = SamplingSpec(max_tokens=1000, seed=0, temperature=0.6, top_k=20, top_p=0.95)
    for cell in itertools.starmap(Cell, itertools.product(args.requests, args.prompts)):
        executor = open_batch(model, cell, args.steps, sampling)
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        times = step_times(executor, cell, args.steps, sampling)
        profile.disable()
        executor.close()
        quick, median = statistics.quantiles(times, n=10, method="inclusive")[0], statistics.median(times)
        name = f"{cell.num_requests:5} requests, {cell.prompt_tokens:4} prompt tokens"
        print(f"{name}: best tenth {1e3 * quick:.3f} ms, median {1e3 * median:.3f} ms")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
