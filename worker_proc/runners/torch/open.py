"""Makes the torch runner, and measures what its steps take."""

import torch

from octavo.kernels.paged_attention import workspace_bytes
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.layout import torch_storage
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.host import HostRunner
from octavo.worker_proc.runners.memory import StepMemory, prompts_plan
from octavo.worker_proc.runners.torch.forward import TorchForward

MEASURED_TOKENS = 128
"""Tokens of the step that is measured. Activations grow in proportion to tokens, so a larger budget is
scaled up from here instead of making every start-up wait for a full step."""


def open_runner(
    model: Model, config: ResolvedConfig, stream: Stream | None, *, num_blocks: int, max_model_len: int
) -> HostRunner:
    """See `octavo.worker_proc.runners.registry.RunnerModule`."""
    model.prepare(max_model_len)
    attention = PagedCacheAttention(torch_storage(config, model.cache_groups, num_blocks), model.cache_groups)
    return HostRunner.build(TorchForward(model, attention), config, None, num_blocks)


def measure(model: Model, device: Device, config: ResolvedConfig) -> StepMemory:
    """Run two short steps, which also warm the kernels up, and scale the result to the largest ones.

    The first is a prefill chunk without a sample, scaled from `MEASURED_TOKENS` to the token budget; the second decodes
    `max_num_seqs` requests and samples for each. What attention needs for a request of `max_model_len` tokens is
    computed. The measured part is never less than the logits of all samples and one copy of them: memory that was
    reused from an earlier peak cannot be seen from outside.
    """
    budget, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    num_tokens = min(budget, MEASURED_TOKENS, config.max_model_len)
    prefill = _peak_growth(model, device, config, [num_tokens], samples=False)
    decode = _peak_growth(model, device, config, [1] * num_seqs, samples=True)
    logits_bytes = num_seqs * config.model.vocab_size * torch.float32.itemsize
    measured = max(prefill * -(-budget // num_tokens) + decode, 2 * logits_bytes)
    workspace = max(
        workspace_bytes(config.max_model_len, group.shape, model.dtype, device.torch_device)
        for group in model.cache_groups
    )
    return StepMemory(measured + workspace)


def _peak_growth(model: Model, device: Device, config: ResolvedConfig, lengths: list[int], *, samples: bool) -> int:
    """Return how far memory rises in one step of equal requests; its cache, made before, does not count."""
    num_tokens = lengths[0]
    blocks_each = -(-num_tokens // config.block_size)
    num_groups = len(model.cache_groups)
    num_blocks = len(lengths) * blocks_each
    runner = open_runner(model, config, None, num_blocks=num_blocks, max_model_len=num_tokens)
    batch = BatchState(
        num_slots=len(lengths),
        max_model_len=num_tokens,
        block_size=config.block_size,
        vocab_size=config.model.vocab_size,
        num_groups=num_groups,
    )
    executor = PipelinedExecutor(batch, runner, lambda result: None, answers=model.stage.is_last)
    sampling = SamplingSpec(max_tokens=1, seed=0, temperature=1.0)
    device.reset_peak()
    executor.begin(prompts_plan(lengths, sampling, blocks_each, num_groups=num_groups, samples=samples))
    return device.peak_growth_bytes()
