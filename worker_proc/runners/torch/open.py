"""Makes the torch runner, and measures the memory of its steps."""

import torch

from octavo.kernels.paged_attention.cpu import workspace_bytes
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import RequestParams, SamplingSpec
from octavo.worker_proc.attention.native import NativeCacheAttention
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.attention.recorded import StepBounds
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.layout import cache_layout, torch_storage
from octavo.worker_proc.cache.states import open_states
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.pooling.pooler import Pooler
from octavo.worker_proc.runners.host import HostRunner
from octavo.worker_proc.runners.memory import POOLED_WHOLE, StepMemory, prompts_plan
from octavo.worker_proc.runners.torch.forward import TorchForward

MEASURED_TOKENS = 128
"""Tokens of the measured step. Activations grow in proportion to tokens, so larger steps are extrapolated instead of
making every start-up wait for a full step."""

_SAMPLED: RequestParams = SamplingSpec(max_tokens=1, seed=0, temperature=1.0)


def open_runner(
    model: Model,
    config: ResolvedConfig,
    stream: Stream | None,
    *,
    num_blocks: int,
    max_model_len: int,
    num_states: int = 0,
) -> HostRunner:
    """See `octavo.worker_proc.runners.registry.RunnerModule`."""
    attention = open_attention(model, config, num_blocks=num_blocks, num_states=num_states, max_model_len=max_model_len)
    forward = TorchForward(model, attention, max_model_len)
    return HostRunner.build(forward, config, model.library, num_blocks)


def open_attention(
    model: Model, config: ResolvedConfig, *, num_blocks: int, num_states: int, max_model_len: int
) -> PagedCacheAttention | NativeCacheAttention:
    """Make the cache, and the attention over it: native if the model has a library.

    Raises:
        MemoryError, RuntimeError: not enough memory.
    """
    groups = model.cache_groups
    if model.library is None:
        states = open_states(model.state_group, num_states)
        storage = torch_storage(config, groups, num_blocks)
        return PagedCacheAttention(storage, groups, states, model.cache_scales, model.cross_cache)
    layouts = [cache_layout(config, group, index) for index, group in enumerate(groups)]
    bounds = StepBounds(config.max_num_batched_tokens, max_model_len, config.max_num_seqs, config.num_threads)
    return NativeCacheAttention(model.library, groups, layouts, num_blocks, bounds, model.cache_scales)


def measure(model: Model, device: Device, config: ResolvedConfig) -> StepMemory:
    """Run two short steps, which also warm up the kernels, and scale the result to the largest steps.

    The first is a prefill chunk without a sample, scaled from `MEASURED_TOKENS` to the token budget. The second decodes
    `max_num_seqs` requests and samples for each. The workspace of attention for a request of `max_model_len` tokens is
    computed. The measured part is at least the logits of all samples and one copy of them: memory that is reused from
    an earlier peak cannot be measured.
    """
    budget, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    num_tokens = min(budget, MEASURED_TOKENS, config.max_model_len)
    prefill = _peak_growth(model, device, config, [num_tokens], samples=False)
    decode = _peak_growth(model, device, config, [1] * num_seqs, samples=True)
    vocab_size = 0 if config.model.pooling else config.model.vocab_size
    logits_bytes = num_seqs * vocab_size * torch.float32.itemsize
    measured = max(prefill * -(-budget // num_tokens) + decode, 2 * logits_bytes)
    return StepMemory(measured + _workspace_bytes(model, config))


def _workspace_bytes(model: Model, config: ResolvedConfig) -> int:
    """Return the workspace bytes of attention for requests of `max_model_len` tokens."""
    if model.library is not None:
        attention = open_attention(model, config, num_blocks=1, num_states=0, max_model_len=config.max_model_len)
        assert isinstance(attention, NativeCacheAttention), "the attention of a model with a library"
        return attention.workspace_bytes
    sizes = (workspace_bytes(config.max_model_len, group.shape, model.dtype) for group in model.cache_groups)
    return max(sizes, default=0)


def _peak_growth(model: Model, device: Device, config: ResolvedConfig, lengths: list[int], *, samples: bool) -> int:
    """Return the memory growth of one step of equal requests. Its cache, allocated before, does not count."""
    num_tokens = lengths[0]
    blocks_each = -(-num_tokens // config.block_size)
    num_groups, has_states = len(model.cache_groups), model.state_group is not None
    num_blocks = len(lengths) * blocks_each
    runner = open_runner(
        model, config, None, num_blocks=num_blocks, max_model_len=num_tokens, num_states=int(has_states)
    )
    batch = BatchState(
        num_slots=len(lengths),
        max_model_len=num_tokens,
        block_size=config.block_size,
        vocab_size=config.model.vocab_size,
        num_groups=num_groups,
        has_states=has_states,
        cross_inputs=model.cross_cache.inputs if model.cross_cache else None,
    )
    pooling, params = config.model.pooling, _SAMPLED
    pooler = None
    if pooling is not None:
        pooler, params = Pooler(pooling, model.pooling_head), POOLED_WHOLE
    executor = PipelinedExecutor(batch, runner, lambda result: None, pooler=pooler, is_last_stage=model.stage.is_last)
    device.reset_peak()
    executor.begin(
        prompts_plan(lengths, params, blocks_each, num_groups=num_groups, has_states=has_states, samples=samples)
    )
    return device.peak_growth_bytes()
