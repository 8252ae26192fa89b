"""Measure the scales of cached keys and values (`--calculate-kv-scales`) with a fixed prompt, in full precision.

Nothing is stored: the same weights give the same scales, so a replaced worker measures them again.
"""

import contextlib
import logging
import math

import torch
from msgspec.structs import replace

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled, StepPlan
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights.cache_scales import CacheScales

logger = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Most tokens of the prompt. The prompt is shorter if a step or a request cannot have as many."""
_BLOCK_SIZE = 16
_LARGEST = 448.0
"""Largest number of the E4M3 type."""
_MARGIN = 2.0
"""Headroom: keys and values of other prompts may be larger by this factor before they are clamped. It costs a float no
precision, except next to zero."""
_HINT = "leave out --calculate-kv-scales, or use --kv-cache-dtype auto"


@torch.inference_mode()
def measure_cache_scales(model: Model, config: ResolvedConfig, stream: Stream | None) -> CacheScales:
    """Return scales for all layers of this rank. Blocks until all ranks have measured theirs.

    A scale is a power of two, so that it does not change with the last bits of a sum, and the same on every rank.

    Raises:
        ConfigError: the model computes keys or values that are not finite.
        MemoryError, RuntimeError: not enough memory for the prompt.
    """
    largest = _largest_numbers(model, config, stream)
    placement = model.parameters.placement
    if placement.group is not None:
        rank, size = placement.sharding.rank, placement.sharding.size
        rows = torch.zeros(size, largest.numel(), device=placement.device)
        rows[rank] = largest.flatten().to(placement.device)
        largest = placement.group.all_reduce(rows, None, torch.float32).cpu().amax(0).view_as(largest)
    scales: CacheScales = {}
    layers = sorted(layer for group in model.cache_groups for layer in group.layers)
    for layer, (keys, values) in zip(layers, largest.tolist(), strict=True):
        if not (math.isfinite(keys) and math.isfinite(values)):
            raise ConfigError(f"keys or values of layer {layer} are no numbers: the cache has no scale", hint=_HINT)
        scales[layer] = _scale(keys), _scale(values)
    for name, index in (("keys", 0), ("values", 1)):
        found = [scale[index] for scale in scales.values()]
        logger.info(
            "scales of %s in the cache, measured on %d tokens: %g to %g in %d layers",
            *(name, _num_tokens(config), min(found, default=1.0), max(found, default=1.0), len(found)),
        )
    return scales


def _scale(largest: float) -> float:
    return 2.0 ** math.ceil(math.log2(largest * _MARGIN / _LARGEST)) if largest > 0 else 1.0


def _num_tokens(config: ResolvedConfig) -> int:
    return min(MAX_TOKENS, config.max_model_len, config.max_num_batched_tokens)


def calibration_tokens(vocab_size: int, count: int) -> list[int]:
    """Return the prompt: ids scattered over the vocabulary (multiples of a 32-bit golden ratio)."""
    return [((index * 2654435761) % 2**32 * vocab_size) >> 32 for index in range(1, count + 1)]


def _largest_numbers(model: Model, config: ResolvedConfig, stream: Stream | None) -> torch.Tensor:
    """Return the largest magnitudes of keys and values by layer, in the order of layer indices: shape (layers, 2)."""
    num_tokens = _num_tokens(config)
    blocks_each = -(-num_tokens // _BLOCK_SIZE)
    num_groups, has_states = len(model.cache_groups), model.state_group is not None
    exact = replace(config, kv_cache_dtype=config.dtype, block_size=_BLOCK_SIZE, max_graph_size=0)
    num_blocks = num_groups * blocks_each
    executor = open_executor(
        model,
        exact,
        stream,
        lambda result: None,
        num_blocks=num_blocks,
        num_states=int(has_states),
        max_model_len=num_tokens,
    )
    buffers = executor.runner.cache_buffers
    for buffer in buffers:
        buffer.zero_()
    blocks = [list(range(group * blocks_each, (group + 1) * blocks_each)) for group in range(num_groups)]
    admitted = Admitted(
        slot=0,
        request_id="",
        token_ids=pack_ids(calibration_tokens(config.model.vocab_size, num_tokens)),
        num_prompt_tokens=num_tokens,
        block_ids=blocks + [[0] * blocks_each] * has_states,
        params=SamplingSpec(max_tokens=1, seed=0, temperature=1.0),
    )
    with contextlib.closing(executor):
        executor.begin(StepPlan(0, [], [admitted], [], [Scheduled(0, 0, num_tokens, 0)]))
        executor.drain()
        numbers = [buffer.flatten().view(torch.uint8).view(model.dtype) for buffer in buffers]
        found: dict[int, list[float]] = {}
        for index, group in enumerate(model.cache_groups):
            own = slice(index * blocks_each, (index + 1) * blocks_each)
            per_place = 1 if group.shape.key_value_dim else 2  # values that are parts of keys are not stored
            for place, layer in enumerate(group.layers):
                stored = numbers[per_place * place : per_place * (place + 1)]
                largest = [tensor.view(num_blocks, -1)[own].float().abs().max().item() for tensor in stored]
                found[layer] = [largest[0], largest[-1]]
    return torch.tensor([found[layer] for layer in sorted(found)]).reshape(-1, 2)
