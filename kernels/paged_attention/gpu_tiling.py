"""How tiles of the GPU kernels of `paged_attention` are chosen: their rows and keys, and launch options."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from octavo.kernels.dispatch import require
from octavo.kernels.paged_attention.shape import AttentionShape

MAX_HEAD_DIM = 256
MAX_LATENT_DIM, MAX_TAIL_DIM = 512, 64
"""Maximum dimensions of values that are the first part of keys, and of the tail of such a key."""

_MIN_HEAD_BLOCK, _MIN_SPLIT_ROWS, _MAX_SPLIT_ROWS = 64, 16, 64
"""Hopper's wgmma needs heads of 64 dimensions and 16 columns. For smaller tiles one of the two kernels would use
another instruction, which might round differently."""
_LATENT_ROWS, _FEW_LATENT_ROWS = 32, 16
"""Maximum query heads in a tile of latent keys: on Hopper, and on other GPUs, where more would spill registers."""
_SHARED_ROWS = 32
"""Query heads in a tile of requests that share keys. More do not fit the registers."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of keys and launch options, chosen by the registers and shared memory that the compiler reports.

    The tile determines the order of sums, so both kernels use the same tile. Reading the block table occupies pipeline
    stages, and so does wgmma, which reads a tile while others are loaded. Of 5 stages, one or two load tiles.
    """

    tile: int
    chunk: dict[str, Any]
    split: dict[str, Any]

    @staticmethod
    @cache
    def of(shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype, architecture: int) -> "Tiling":
        """Choose for a compute capability, such as 90 for Hopper."""
        # Consumer GPUs from Ampere to Blackwell have at most 99 KiB of shared memory per program.
        tile = 64 if 90 <= architecture < 120 else 32
        if shape.key_value_dim is not None:
            options = _options(8, 2 if dtype != torch.float32 else 1)
            return Tiling(tile if dtype != torch.float32 else 16, options, options)
        if dtype == torch.float32:
            stages = _options(8, 2)
            return Tiling(16, stages, stages)
        if head_block(shape) > 128:
            stages = _options(8, 3)
            return Tiling(tile, stages, stages)
        # With a soft cap there are not enough registers for another stage.
        chunk = _options(8, 5 if shape.soft_cap is None else 3)
        split = _options(4, 2 if cache_dtype != dtype else 5 if tile == 64 else 4)
        return Tiling(tile, chunk, split)


def _options(num_warps: int, num_stages: int) -> dict[str, Any]:
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def architecture() -> int:
    """Return the compute capability of this process's GPU; Hopper's in the interpreter."""
    if triton.knobs.runtime.interpret:
        return 90
    return int(triton.runtime.driver.active.get_current_target().arch)


def tiled(shape: AttentionShape) -> AttentionShape:
    """Return the shape as the kernels see it: the query heads of a latent key are divided into groups that fit a tile.

    Raises:
        ShapeError: there are no tiles for this shape.
    """
    if shape.key_value_dim is None:
        has_tiles = shape.head_dim <= MAX_HEAD_DIM and shape.group <= chunk_rows(shape)
    else:
        tail_dim = shape.head_dim - shape.key_value_dim
        has_tiles = (
            shape.num_kv_heads == 1 and 0 < shape.key_value_dim <= MAX_LATENT_DIM and 0 < tail_dim <= MAX_TAIL_DIM
        )
    require(
        has_tiles,
        f"paged_attention: no tiles for {shape.group} heads of {shape.head_dim} dimensions, of which "
        f"{shape.value_dim} are values, for each of {shape.num_kv_heads} key heads",
    )
    if shape.key_value_dim is None:
        return shape
    group = next(size for size in range(latent_rows(), 0, -1) if shape.num_heads % size == 0)
    return replace(shape, num_kv_heads=shape.num_heads // group)


def head_block(shape: AttentionShape) -> int:
    """Return the padded head dimension of tiles."""
    return max(int(triton.next_power_of_2(shape.value_dim)), _MIN_HEAD_BLOCK)


def chunk_rows(shape: AttentionShape) -> int:
    """Return the number of rows of a chunk tile."""
    if shape.key_value_dim is not None:
        return latent_rows()
    return 128 if head_block(shape) <= 128 else 64


def split_rows(shape: AttentionShape) -> int:
    """Return the number of rows of a decode tile."""
    most = _MAX_SPLIT_ROWS if shape.key_value_dim is None else latent_rows()
    return max(min(int(triton.next_power_of_2(shape.group)), most), _MIN_SPLIT_ROWS)


def latent_rows() -> int:
    """Return the maximum query heads in a tile of a latent key."""
    return _LATENT_ROWS if architecture() // 10 == 9 else _FEW_LATENT_ROWS


def shared_rows(shape: AttentionShape) -> int:
    """Return the number of rows of a tile of requests that share keys."""
    return _SHARED_ROWS if shape.key_value_dim is None else min(_SHARED_ROWS, latent_rows())


def can_share(shape: AttentionShape) -> bool:
    """Return whether requests can share keys. With a window, they see different ones."""
    return shape.window is None and shared_rows(shape) // shape.group > 1
