"""What a configuration says about the cache: its types and the bytes of a block. Allocates only when asked."""

import torch

from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.cache.storage import KVStorage, block_bytes

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


_CPU = torch.device("cpu")


def cache_layout(config: ResolvedConfig) -> CacheLayout:
    """Return the native cache of one layer."""
    facts = config.model
    return CacheLayout(_DTYPES[config.kv_cache_dtype], config.block_size, facts.num_kv_heads, facts.head_dim)


def torch_storage(config: ResolvedConfig, num_blocks: int, device: torch.device = _CPU) -> KVStorage:
    """Allocate the cache of steps that are computed through torch, or on a GPU.

    Raises:
        ConfigError: a type that only the native path stores.
        RuntimeError: there is no memory for it.
    """
    return KVStorage(
        num_layers=config.model.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=config.model.num_kv_heads,
        head_dim=config.model.head_dim,
        dtype=_torch_dtype(config),
        device=device,
    )


def kv_block_bytes(config: ResolvedConfig, *, is_native: bool) -> int:
    """Return the bytes of a block over all layers, keys and values."""
    facts = config.model
    if is_native:
        return facts.num_layers * cache_layout(config).block_bytes
    return block_bytes(facts.num_layers, config.block_size, facts.num_kv_heads, facts.head_dim, _torch_dtype(config))


def _torch_dtype(config: ResolvedConfig) -> torch.dtype:
    if config.kv_cache_dtype == "int8":
        raise ConfigError(
            "--kv-cache-dtype int8 needs the native kernels, and this run is without them",
            hint="see the warning above, or leave --kv-cache-dtype out",
        )
    return _DTYPES[config.kv_cache_dtype]
