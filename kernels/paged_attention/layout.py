"""The layout of the native cache of keys and values, mirrored from `layout.h`. Reads and writes no keys."""

import ctypes
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo.kernels.native.arguments import TYPES
from octavo.kernels.native.memory import HUGE_PAGE_BYTES, SMALL_PAGE_BYTES, allocate
from octavo.kernels.paged_attention.shape import AttentionShape

GROUP_SLOTS = 16
"""Slots that are stored together, for any block size."""
MAX_HEAD_DIM = 576

_SCALE_BYTES = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)


class LayoutArguments(ctypes.Structure):
    """See `CacheLayout` in `layout.h`."""

    _fields_ = [
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("cache_group", ctypes.c_int32),
        ("key_value_dim", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, layout: "CacheLayout") -> Self:
        """Return the C++ structure of a layout."""
        return cls(
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            TYPES[layout.dtype],
            layout.cache_group,
            layout.key_value_dim or 0,
        )


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of one layer.

    Raises:
        ValueError: heads have more than `MAX_HEAD_DIM` dimensions, or no cache has this dtype.
    """

    dtype: torch.dtype
    """float32, bfloat16, float16, int8 or float8_e4m3fn; int8 has a float32 factor for each slot and head."""
    block_size: int
    num_kv_heads: int
    head_dim: int
    cache_group: int = 0
    """Index of the layer's cache group in a step, whose slots and block table it uses."""
    key_value_dim: int | None = None
    """Values are the first `key_value_dim` elements of keys and are not stored; `None` if they are stored, as long as
    keys."""

    def __post_init__(self) -> None:
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"heads of {self.head_dim} dimensions; native attention has at most {MAX_HEAD_DIM}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"a cache of {self.dtype}")

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, block_size: int, cache_group: int = 0) -> Self:
        """Return the cache of a layer with this attention."""
        return cls(dtype, block_size, shape.num_kv_heads, shape.head_dim, cache_group, shape.key_value_dim)

    @property
    def padded_dim(self) -> int:
        """The head dimension as stored: a multiple of 16."""
        return -(-self.head_dim // GROUP_SLOTS) * GROUP_SLOTS

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's keys, or of its values if they are stored."""
        scale_bytes = _SCALE_BYTES if self.dtype == torch.int8 else 0
        return self.num_kv_heads * (self.padded_dim * self.dtype.itemsize + scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one layer, keys and values."""
        return (2 if self.key_value_dim is None else 1) * self.block_size * self.slot_bytes

    def keys(self, buffer: Tensor, first: int, count: int) -> Tensor:
        """Return a copy of the keys of consecutive slots in float32, shape SKH.

        Args:
            buffer: keys of a layer.
            first: first slot.
            count: number of slots.

        Raises:
            ValueError: the cache holds 8-bit elements.
        """
        if self.dtype.itemsize == 1:
            raise ValueError(f"the keys of a cache of {self.dtype} are not read back")
        step = 2 if self.dtype == torch.bfloat16 else 1
        begin, end = first // GROUP_SLOTS, -(-(first + count) // GROUP_SLOTS)
        tiles = buffer.view(self.dtype).view(-1, self.num_kv_heads, self.padded_dim // step, GROUP_SLOTS, step)
        rows_SKH = tiles[begin:end].permute(0, 3, 1, 2, 4).reshape(-1, self.num_kv_heads, self.padded_dim)
        return rows_SKH[first - begin * GROUP_SLOTS :][:count, :, : self.head_dim].float()

    def allocate(self, num_blocks: int, index: int = 0, num_layers: int = 1) -> tuple[Tensor, Tensor]:
        """Return the buffers of one layer's keys and values. Their pages are allocated on the first write.

        If values are not stored, both are the same buffer. Together they take `num_blocks * block_bytes` bytes, and up
        to two more groups if groups span blocks.

        Args:
            num_blocks: number of blocks.
            index: index of the layer, from 0 to `num_layers` - 1. Each layer's buffer begins at another offset in a
                huge page. Otherwise all of them would reach the end of a page in the same step, which would wait for
                all new pages.
            num_layers: number of layers that use the same blocks.

        Raises:
            MemoryError: the system cannot reserve that much.
        """
        num_groups = -(-num_blocks * self.block_size // GROUP_SLOTS)
        num_bytes = num_groups * GROUP_SLOTS * self.slot_bytes
        num_pages = HUGE_PAGE_BYTES // SMALL_PAGE_BYTES
        k_offset, v_offset = (
            (2 * index + number) * num_pages // (2 * num_layers) * SMALL_PAGE_BYTES for number in range(2)
        )
        keys = allocate(num_bytes, k_offset)
        return keys, keys if self.key_value_dim is not None else allocate(num_bytes, v_offset)
