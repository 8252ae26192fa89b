"""The tensors of int8 caches on GPUs. In each block, the scales of a head's slots follow their levels.

A block of a head is `block_size` rows of levels, -127 to 127, and then `block_size` float32 scales. This is the order
of the native cache, with blocks in place of groups of 16 slots. A key or value is its levels times its scale.
"""

import torch
from torch import Tensor

from octavo.kernels.dispatch import require

SCALE_BYTES = 4
LARGEST = 127


def block_bytes(block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a block's keys, or of its values."""
    return block_size * num_kv_heads * (head_dim + SCALE_BYTES)


def empty_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, device: torch.device | str
) -> Tensor:
    """Return uninitialized memory for keys or values: bytes, shape (blocks, heads, bytes of a block of one head).

    Raises:
        ShapeError: scales would not be aligned.
    """
    require(
        block_size * head_dim % SCALE_BYTES == 0,
        f"a cache of int8 needs blocks of a multiple of {SCALE_BYTES} numbers, not {block_size} x {head_dim}",
    )
    size = block_size * (head_dim + SCALE_BYTES)
    return torch.empty(num_blocks, num_kv_heads, size, dtype=torch.int8, device=device)


def levels_of(memory: Tensor, block_size: int) -> Tensor:
    """Return the levels in the form that kernels read, a view of shape PSKH (blocks, slots, key heads, head
    dimension)."""
    num_blocks, num_kv_heads, size = memory.shape
    head_dim = size // block_size - SCALE_BYTES
    return memory.as_strided((num_blocks, block_size, num_kv_heads, head_dim), (num_kv_heads * size, head_dim, size, 1))


def scales_of(cache_PSKH: Tensor) -> Tensor:
    """Return the float32 scales of levels, a view of shape PSK1 (blocks, slots, key heads, 1)."""
    num_blocks, block_size, num_kv_heads, head_dim = cache_PSKH.shape
    block_stride, size = cache_PSKH.stride(0) // SCALE_BYTES, cache_PSKH.stride(2) // SCALE_BYTES
    first = (cache_PSKH.storage_offset() + block_size * head_dim) // SCALE_BYTES
    scales = torch.empty(0, dtype=torch.float32, device=cache_PSKH.device)
    shape = num_blocks, block_size, num_kv_heads, 1
    return scales.set_(cache_PSKH.untyped_storage(), first, shape, (block_stride, 1, size, 1))


def can_hold(cache_PSKH: Tensor, dtype: torch.dtype) -> bool:
    """Return whether GPU kernels can store keys or values of `dtype` in a cache: its own dtype, float8 or these
    integers."""
    if cache_PSKH.dtype != torch.int8:
        return cache_PSKH.dtype in (dtype, torch.float8_e4m3fn)
    _, block_size, num_kv_heads, head_dim = cache_PSKH.shape
    size = block_size * (head_dim + SCALE_BYTES)
    return cache_PSKH.stride() == (num_kv_heads * size, head_dim, size, 1)


def quantized(x_TKH: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels, and scales TK1, of keys or values; the scale is NaN if an element is not finite."""
    x_TKH = x_TKH.float()
    scale_TK1 = x_TKH.abs().amax(2, keepdim=True) / LARGEST
    scale_TK1 += (x_TKH * 0).sum(2, keepdim=True)
    inverse_TK1 = torch.where(scale_TK1 > 0, 1 / scale_TK1, 0.0)
    levels_TKH = (x_TKH * inverse_TK1).round().clamp(-LARGEST, LARGEST).nan_to_num(0.0)
    return levels_TKH.to(torch.int8), scale_TK1


def numbers_of(cache_PSKH: Tensor) -> Tensor:
    """Return keys or values as float32."""
    return cache_PSKH.float() * scales_of(cache_PSKH)
