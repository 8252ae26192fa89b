"""How much memory steps on a GPU take beside weights and cache: by running the largest ones. Plans nothing."""

import contextlib
from dataclasses import dataclass

import msgspec
import torch

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled, StepPlan, StepResult
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.pipeline.build import build_pipeline

_REQUEST = SamplingSpec(max_tokens=1, seed=0, temperature=1.0, top_k=50, logprobs=1)


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes."""

    activation_bytes: int
    graph_bytes: int


@torch.inference_mode()
def measure_pipeline(model: Model, device: Device, stream: Stream, config: ResolvedConfig) -> Measured:
    """Run the largest prefill and the largest decode, and capture two graphs.

    Everything that steps need and that does not depend on the number of blocks counts as activations. All graphs share
    their memory, of which the largest takes most; what another one adds is measured on the second and counted for each.

    Raises:
        RuntimeError: there is no memory for it.
    """
    prompts = _prompts(config)
    blocks_each = -(-max(prompts) // config.block_size)
    num_blocks = max(blocks_each * len(prompts), config.max_num_seqs)
    return Measured(
        _activation_bytes(model, device, stream, config, prompts, num_blocks),
        _graph_bytes(model, device, stream, config),
    )


def _activation_bytes(
    model: Model, device: Device, stream: Stream, config: ResolvedConfig, prompts: list[int], num_blocks: int
) -> int:
    """Run a step of prompts, and one in which every request decodes."""
    device.reset_peak()
    eager = msgspec.structs.replace(config, max_graph_size=0)
    results: list[StepResult] = []
    pipeline = build_pipeline(
        model, eager, stream, results.append, num_blocks=num_blocks, max_model_len=config.max_model_len
    )
    with contextlib.closing(pipeline.executor) as executor:
        executor.begin(_plan(0, [], prompts, -(-max(prompts) // config.block_size)))
        executor.begin(_plan(1, list(range(len(prompts))), [1] * config.max_num_seqs, 1))
        executor.drain()
        return device.peak_growth_bytes() - pipeline.cache_bytes


def _graph_bytes(model: Model, device: Device, stream: Stream, config: ResolvedConfig) -> int:
    """Capture the two largest graphs, and count the second for all that follow."""
    results: list[StepResult] = []
    pipeline = build_pipeline(model, config, stream, results.append, num_blocks=1, max_model_len=config.max_model_len)
    num_bytes = 0
    with contextlib.closing(pipeline.executor) as executor:
        sizes = executor.runner.uncaptured
        for size, times in zip(sizes[:2], (1, len(sizes) - 1), strict=False):
            # What the kernels took when they were run once before the capture is free again.
            free_bytes = device.free_bytes()
            executor.runner.capture(size)
            num_bytes += times * max(0, free_bytes - device.free_bytes())
    return num_bytes


def _prompts(config: ResolvedConfig) -> list[int]:
    """Return the lengths of prompts that fill a step."""
    budget, longest = config.max_num_batched_tokens, config.max_model_len
    lengths = [longest] * (budget // longest) + ([budget % longest] if budget % longest else [])
    return lengths[: config.max_num_seqs]


def _plan(sequence: int, released: list[int], lengths: list[int], blocks_each: int) -> StepPlan:
    admitted = [
        Admitted(
            slot=slot,
            request_id="",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            block_ids=list(range(slot * blocks_each, (slot + 1) * blocks_each)),
            sampling=_REQUEST,
        )
        for slot, length in enumerate(lengths)
    ]
    scheduled = [Scheduled(slot, 0, length, True) for slot, length in enumerate(lengths)]
    return StepPlan(sequence, released, admitted, [], scheduled)
