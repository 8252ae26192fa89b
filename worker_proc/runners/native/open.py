"""Makes the native runner, and computes the memory of its steps."""

import torch

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import NotEnoughMemoryError
from octavo.worker_proc.attention.recorded import StepBounds
from octavo.worker_proc.cache.layout import cache_layout
from octavo.worker_proc.cache.states import open_states
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.runner import PROMPT_LOGPROBS_ROWS
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.host import HostRunner
from octavo.worker_proc.runners.memory import StepMemory
from octavo.worker_proc.runners.native.programs import NativePrograms


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
    programs = build_programs(model, config, num_blocks=num_blocks, max_model_len=max_model_len, num_states=num_states)
    return HostRunner.build(programs, config, model.library, num_blocks)


def measure(model: Model, device: Device, config: ResolvedConfig) -> StepMemory:
    """Return the activation memory that the recorded programs plan, and the sampler's copy of the logits."""
    try:
        sizes = {"num_blocks": 1, "max_model_len": config.max_model_len, "num_states": 1}
        programs = build_programs(model, config, **sizes)
        head_bytes = build_programs(model.head, config, **sizes).num_bytes if model.head else 0
    except MemoryError as error:
        raise NotEnoughMemoryError(
            f"the activations of a step do not fit in memory: {error}",
            hint="use a smaller --max-num-batched-tokens or --max-model-len",
        ) from error
    vocab_size = 0 if config.model.pooling else config.model.vocab_size
    return StepMemory(programs.num_bytes + head_bytes + config.max_num_seqs * vocab_size * torch.float32.itemsize)


def build_programs(
    model: Model,
    config: ResolvedConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    num_states: int = 0,
    min_logits: int = PROMPT_LOGPROBS_ROWS,
) -> NativePrograms:
    """Make the cache of a model that is packed for native programs, and record the programs.

    Args:
        model: model with its weights; shared, not copied.
        config: sizes of a step and of a block, types, threads.
        num_blocks: number of blocks of the cache.
        max_model_len: longest request, in tokens.
        num_states: number of slots for recurrent states.
        min_logits: rows that one call of `logits` must hold, if more than `max_num_seqs`.

    Raises:
        MemoryError: not enough memory for the cache or for the activations.
    """
    assert model.library is not None, "the model is packed for native programs"
    bounds = StepBounds(
        max_rows=config.max_num_batched_tokens,
        max_context=max_model_len,
        max_logits=config.max_num_batched_tokens if config.model.pooling else max(config.max_num_seqs, min_logits),
        num_threads=config.num_threads,
    )
    layouts = [cache_layout(config, group, index) for index, group in enumerate(model.cache_groups)]
    states = open_states(model.state_group, num_states)
    return NativePrograms(model.library, model, layouts, num_blocks, bounds, states)
