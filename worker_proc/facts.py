"""Measure the facts that the core plans memory with: weights, peak memory of a step, size of a block.

Plans nothing itself and leaves nothing behind: the measured steps use a cache and a batch of their own.
"""

from importlib import metadata

import torch

from octavo.protocol.config import CacheGroupSpec, DeviceFacts, ResolvedConfig
from octavo.worker_proc.cache.copy_speed import measure_block_copy
from octavo.worker_proc.cache.groups import CacheGroup
from octavo.worker_proc.cache.layout import kv_block_bytes
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.lora.loader import AdapterLoader
from octavo.worker_proc.media.open import encoder_bytes
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.registry import check_batch_invariance, measure_steps


def measure(
    model: Model,
    device: Device,
    config: ResolvedConfig,
    *,
    rank: int,
    free_bytes: int,
    adapters: AdapterLoader | None = None,
) -> DeviceFacts:
    """Return the facts of a device that holds a loaded model.

    Args:
        model: model with loaded weights.
        device: device that holds the model.
        config: sizes of a step.
        rank: rank of this worker.
        free_bytes: free memory before the weights were loaded.
        adapters: fills the slots of LoRA adapters; `None` if there are none.

    Raises:
        NotEnoughMemoryError: a step of these sizes does not fit in memory.
        ConfigError: a model of `transformers` mixes the rows of requests.
    """
    variant = check_batch_invariance(model, config) if model.impl == "transformers" else ""
    memory = measure_steps(model, device, config)
    specs = cache_group_specs(model, config)
    offloads = bool(config.kv_offloading_bytes or config.stores_blocks) and config.kv_offloading_recompute
    return DeviceFacts(
        rank=rank,
        device_name=device.name,
        total_bytes=device.total_bytes,
        free_bytes=free_bytes,
        weights_bytes=model.weights_bytes,
        activation_bytes=memory.activation_bytes + encoder_bytes(model, device, config),
        graph_bytes=memory.graph_bytes,
        adapter_bytes=adapters.num_bytes if adapters else 0,
        exchange_bytes=engines.share_bytes if (engines := model.parameters.placement.engines) else 0,
        cpu_kernels=_cpu_kernels(model) if config.device == "cpu" else "",
        cache_groups=specs,
        model_impl=model.impl,
        variant_module=variant,
        host_block_s=measure_block_copy(specs, device, model.library, config.num_threads) if offloads else 0.0,
    )


def _cpu_kernels(model: Model) -> str:
    """Return which kernels this machine uses. It may have no compiler, or a library of a lower instruction set
    level."""
    kernels = f"native {model.library.isa}" if model.library else f"torch {torch.__version__}"
    if model.impl == "octavo":
        return kernels
    return f"{kernels}, torch {torch.__version__}, transformers {metadata.version('transformers')}"


def cache_group_specs(model: Model, config: ResolvedConfig) -> list[CacheGroupSpec]:
    """Return what the core needs to know about the cache groups of a model. The group of states is the last one."""
    is_native = model.library is not None
    # Every block of the model holds keys for a draft head.
    head_groups = model.head.cache_groups if model.head else ()
    head_bytes = sum(kv_block_bytes(config, group, is_native=is_native) for group in head_groups)
    specs = [
        _group_spec(group, kv_block_bytes(config, group, is_native=is_native) + head_bytes)
        for group in model.cache_groups
    ]
    if (states := model.state_group) is not None:
        specs.append(CacheGroupSpec(kind="state", num_layers=len(states.layers), block_bytes=states.num_bytes))
    return specs


def _group_spec(group: CacheGroup, block_bytes: int) -> CacheGroupSpec:
    # Bidirectional attention reads all keys in the only step of a request.
    window = group.shape.window if group.shape.is_causal else None
    return CacheGroupSpec(
        kind="full" if window is None else "chunk" if group.shape.is_chunked else "window",
        window=window or 0,
        num_layers=len(group.layers),
        block_bytes=block_bytes,
    )
