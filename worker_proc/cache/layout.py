"""Layout of the cache for a configuration: its type and the bytes of a block."""

from collections.abc import Sequence

import torch

from octavo.kernels.paged_attention import int8_cache
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.cache.groups import CacheGroup, key_sizes, max_group_layers
from octavo.worker_proc.cache.storage import KVStorage, block_bytes

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


_CPU = torch.device("cpu")


def cache_layout(config: ResolvedConfig, group: CacheGroup, index: int = 0) -> CacheLayout:
    """Return the native cache layout of one layer of a group, the `index`-th group of the model."""
    dtype = _DTYPES[config.kv_cache_dtype]
    return CacheLayout.of(group.shape, dtype, config.block_size, index)


def torch_storage(
    config: ResolvedConfig, groups: Sequence[CacheGroup], num_blocks: int, device: torch.device = _CPU
) -> KVStorage:
    """Allocate the cache that all groups share, for steps through torch or on a GPU.

    Raises:
        ConfigError: only the native kernels support this type, or only for other heads.
        RuntimeError: not enough memory.
    """
    num_kv_heads, head_dim, key_value_dim = key_sizes(groups)
    if config.kv_cache_dtype == "int8" and (key_value_dim or config.block_size * head_dim % int8_cache.SCALE_BYTES):
        reason = "whose values are parts of its keys" if key_value_dim else f"with heads of {head_dim}"
        raise ConfigError(
            f"--kv-cache-dtype int8 on a GPU for a model {reason} (--block-size {config.block_size})",
            hint="use --kv-cache-dtype fp8 or auto" if key_value_dim else "use a --block-size that 4 divides",
        )
    return KVStorage(
        num_layers=max_group_layers(groups),
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        key_value_dim=key_value_dim,
        dtype=_torch_dtype(config),
        device=device,
    )


def kv_block_bytes(config: ResolvedConfig, group: CacheGroup, *, is_native: bool) -> int:
    """Return the bytes of a block over all layers of a group, keys and values."""
    if is_native:
        return group.num_places * cache_layout(config, group).block_bytes
    return block_bytes(group.num_places, config.block_size, group.shape, _torch_dtype(config))


def _torch_dtype(config: ResolvedConfig) -> torch.dtype:
    if config.device == "cpu" and config.kv_cache_dtype in ("int8", "fp8"):
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs the native kernels, which are off",
            hint="see the warning above, or leave out --kv-cache-dtype",
        )
    return _DTYPES[config.kv_cache_dtype]
