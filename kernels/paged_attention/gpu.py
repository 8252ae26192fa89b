"""`paged_attention` on a GPU: launches the kernels over the lists of `gpu_plan`.

A single step is planned with `plan`. Where steps are captured as graphs, one `StepAttention` serves all of them: its
lists and sums have fixed addresses, and a captured launch executes whichever plan was last copied there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import e, log2
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.paged_attention import gpu_plan
from octavo.kernels.paged_attention.gpu_arguments import Form, Partials, Scoring, Strides, Tensors, Tiles, Work
from octavo.kernels.paged_attention.gpu_decode_kernel import split_kernel
from octavo.kernels.paged_attention.gpu_latent_kernel import latent_chunk_kernel
from octavo.kernels.paged_attention.gpu_plan import SEGMENT, Counts, Grid, Integers, Ints, Layout, Limits
from octavo.kernels.paged_attention.gpu_prefill_kernel import chunk_kernel
from octavo.kernels.paged_attention.gpu_prefixes import Prefixes, SegmentLabels
from octavo.kernels.paged_attention.gpu_tile import VALUE_SCALE_FACTOR
from octavo.kernels.paged_attention.int8_cache import can_hold
from octavo.kernels.paged_attention.shape import AttentionShape

MAX_HEAD_DIM = 256
MAX_LATENT_DIM, MAX_TAIL_DIM = 512, 64
"""Of values that are the beginnings of keys, and of the rest of such a key."""

_LOG2_E = log2(e)
_MIN_TAIL_BLOCK = 16
"""Tensor cores add up 16 products at once."""
_MIN_HEAD_BLOCK, _MIN_SPLIT_ROWS, _MAX_SPLIT_ROWS = 64, 16, 64
"""Hopper's wgmma needs heads of 64 dimensions and 16 columns. For smaller tiles one of the two kernels would use
another instruction, which might round differently."""
_LATENT_ROWS, _FEW_LATENT_ROWS = 32, 16
"""Most query heads in a tile if values are parts of keys: on Hopper, and on other GPUs, where more spill registers."""
_SHARED_ROWS = 32
"""Query heads in a tile of requests that share keys. More do not fit into the registers."""
_LEAST_SPARE_TILES, _TOKENS_OF_A_PROMPT = 8, 32
"""What a graph has programs for beside whole tiles: the last tile of each prompt, if prompts have so many tokens."""


class StepAttention:
    """The attention of successive steps, at fixed addresses.

    For each step: `write_plan` on the host, a copy of those words to `words_W`, and a call for each layer. A graph
    captures the call after `launch_for`, and then computes every plan with at most so many tiles of chunks. A plan of
    decodes has none.

    Args:
        shape: of the model.
        block_size: token slots of a block.
        limits: of the plans.
        block_table_RP: int32; a row for each of `limits.max_requests`, in the order of the plans.
        num_programs: of the split kernel; does not change the bits. None: as many as the GPU runs at once.

    Raises:
        ShapeError: the kernels have no tiles for these heads.
    """

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        limits: Limits,
        block_table_RP: Tensor,
        *,
        num_programs: int | None = None,
    ) -> None:
        device = block_table_RP.device
        self._cache_heads = shape.num_kv_heads
        shape = _tiled(shape)
        self._grid = _grid(shape, device, num_programs)
        self.layout = Layout.of(limits, self._grid)
        self.words_W = torch.empty(self.layout.num_words, dtype=torch.int32, device=device)
        self._shape = shape
        self._block_size = block_size
        self._block_table_RP = block_table_RP
        self._counts = Counts(0, 0, 0)
        self._architecture = _architecture()
        self._slopes_N = None if shape.slopes is None else _slopes(shape.slopes, device)
        self._partials = _partials(limits, shape, self._grid.num_programs, device)

    def write_plan(
        self,
        words: Ints,
        query_starts: Integers,
        context_lens: Integers,
        prefixes: Prefixes | None = None,
    ) -> Counts:
        """Write a step's plan to host memory of `layout.num_words` words; see `gpu_plan.write`.

        The following calls launch the kernels that this plan needs.
        """
        self._counts = gpu_plan.write(words, self.layout, self._grid, self._shape, query_starts, context_lens, prefixes)
        return self._counts

    def usual_tiles(self, num_tokens: int) -> int:
        """Return the tiles of chunks that a graph for this many tokens has programs for.

        A step of many short prompts may have more. Each program without a tile costs a part of a microsecond.
        """
        spare = max(_LEAST_SPARE_TILES, num_tokens // _TOKENS_OF_A_PROMPT)
        return min(num_tokens // self._grid.chunk_tokens + spare, self.layout.tile_rows - self.layout.tile_requests)

    def launch_for(self, num_tiles: int) -> None:
        """Have the next calls launch what any plan with at most so many tiles needs, until `write_plan`."""
        self._counts = Counts(1, num_tiles, 0)

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_PSKH: Tensor,
        v_cache_PSKH: Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """See `octavo.kernels.paged_attention.PagedAttention`.

        The caches may be views in which the slots of a head are contiguous instead of the heads of a slot. Rows of
        requests without keys are not written.
        """
        shape = self._shape
        expected = (self._block_size, self._cache_heads, shape.head_dim)
        _check(q_TNH, k_cache_PSKH, v_cache_PSKH, shape, expected)
        require(
            shape.key_value_dim is None
            or (k_scale == v_scale and k_cache_PSKH.stride(0) == self._block_size * k_cache_PSKH.stride(1)),
            "paged_attention: values that are parts of keys have their scale, and blocks side by side",
        )
        q_TNH = q_TNH if q_TNH.stride(2) == 1 else q_TNH.contiguous()
        out_TNH = torch.empty(*q_TNH.shape[:2], shape.value_dim, dtype=q_TNH.dtype, device=q_TNH.device)
        words, layout = self.words_W, self.layout
        tensors = Tensors(
            q_TNH,
            k_cache_PSKH,
            v_cache_PSKH,
            out_TNH,
            self._block_table_RP,
            self._slopes_N,
            sinks_N,
            words[layout.query_starts :],
            words[layout.context_lens :],
        )
        tiling = _Tiling.of(shape, q_TNH.dtype, k_cache_PSKH.dtype, self._architecture)
        arguments = (
            tensors,
            _scoring(shape, k_scale, v_scale / (VALUE_SCALE_FACTOR.value if k_cache_PSKH.dtype == torch.int8 else 1)),
            Strides(*q_TNH.stride()[:2]),
            self._block_table_RP.stride(0),
            _form(shape, k_cache_PSKH, tiling.tile),
        )
        if self._counts.num_entries:
            work = Work(
                words[layout.num_items :],
                words[layout.program_units :],
                words[layout.program_entries :],
                words[layout.entries :],
                words[layout.members :],
                words[layout.items :],
            )
            widths = _split_rows(shape), _shared_rows(shape) if _can_share(shape) else 0
            split_kernel[(self._grid.num_programs,)](work, self._partials, *arguments, *widths, **tiling.split)
        if self._counts.num_tiles:
            self._launch_chunks(arguments, tiling)
        return out_TNH

    def _launch_chunks(self, arguments: tuple[Any, ...], tiling: "_Tiling") -> None:
        """Launch the kernel of prompts and chunks."""
        shape, layout, num_tiles = self._shape, self.layout, self._counts.num_tiles
        tiles = Tiles(self.words_W[layout.tile_requests :], self.words_W[layout.tile_rows :])
        rows, num_programs = _chunk_rows(shape), num_tiles * shape.num_kv_heads
        if shape.key_value_dim is None:
            has_wgmma = self._architecture // 10 == 9
            chunk_kernel[(num_programs,)](tiles, *arguments, rows, has_wgmma, **tiling.chunk)
            return
        grid = (min(num_programs, self._grid.num_programs),)  # each has memory for a total
        latent_chunk_kernel[grid](tiles, num_tiles, self._partials.totals, *arguments, rows, **tiling.chunk)


def plan(
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_table_RP: Tensor,
    block_size: int,
    shape: AttentionShape,
    is_span_R: Sequence[bool] | None = None,
) -> StepAttention:
    """See `octavo.kernels.paged_attention.plan`."""
    require(is_span_R is None, "paged_attention: spans whose rows see each other are not supported on GPUs")
    limits = gpu_plan.limits_of(_grid(_tiled(shape), block_table_RP.device), query_starts, context_lens)
    step = StepAttention(shape, block_size, limits, block_table_RP)
    words, prefixes = np.empty(step.layout.num_words, dtype=np.int32), None
    if block_table_RP.device.type != "meta":
        labels = SegmentLabels.of(block_table_RP.cpu().numpy(), block_size, SEGMENT)
        prefixes = Prefixes(labels.labels_SX, np.arange(len(context_lens)))
    step.write_plan(words, query_starts, context_lens, prefixes)
    step.words_W.copy_(torch.from_numpy(words))
    return step


def workspace_bytes(context_len: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """See `octavo.kernels.paged_attention.workspace_bytes`. Sums are always float32."""
    num_rows = _split_rows(shape := _tiled(shape)) // shape.group
    return -(-context_len // SEGMENT) * num_rows * shape.num_heads * (shape.value_dim + 2) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles of keys and launch options, chosen by the registers and shared memory that the compiler reports.

    The tile determines the order of sums, so both kernels use the same one. Reading the block table, and wgmma, which
    reads a tile while others are loaded, occupy pipeline stages: of 5 stages, one or two load tiles.
    """

    tile: int
    chunk: dict[str, Any]
    split: dict[str, Any]

    @staticmethod
    @cache
    def of(shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype, architecture: int) -> "_Tiling":
        """Choose for a compute capability, such as 90 for Hopper."""
        head_block = _head_block(shape)
        # Consumer GPUs from Ampere to Blackwell have at most 99 KiB of shared memory per program.
        tile = 64 if 90 <= architecture < 120 else 32
        if shape.key_value_dim is not None:
            options = _options(8, 2 if dtype != torch.float32 else 1)
            return _Tiling(tile if dtype != torch.float32 else 16, options, options)
        if dtype == torch.float32:
            stages = _options(8, 2)
            return _Tiling(16, stages, stages)
        if head_block > 128:
            stages = _options(8, 3)
            return _Tiling(tile, stages, stages)
        # With a soft cap there are not enough registers for another stage.
        chunk = _options(8, 5 if shape.soft_cap is None else 3)
        split = _options(4, 2 if cache_dtype != dtype else 5 if tile == 64 else 4)
        return _Tiling(tile, chunk, split)


def _options(num_warps: int, num_stages: int) -> dict[str, Any]:
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def _architecture() -> int:
    """Return the compute capability of this process's GPU; Hopper's in the interpreter."""
    if triton.knobs.runtime.interpret:
        return 90
    return int(triton.runtime.driver.active.get_current_target().arch)


def _tiled(shape: AttentionShape) -> AttentionShape:
    """Return the shape as the kernels see it: the query heads of a latent key in groups that tiles have room for.

    Raises:
        ShapeError: there are no tiles for it.
    """
    if shape.key_value_dim is None:
        has_tiles = shape.head_dim <= MAX_HEAD_DIM and shape.group <= _chunk_rows(shape)
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
    group = next(size for size in range(_latent_rows(), 0, -1) if shape.num_heads % size == 0)
    return replace(shape, num_kv_heads=shape.num_heads // group)


def _head_block(shape: AttentionShape) -> int:
    return max(int(triton.next_power_of_2(shape.value_dim)), _MIN_HEAD_BLOCK)


def _chunk_rows(shape: AttentionShape) -> int:
    if shape.key_value_dim is not None:
        return _latent_rows()
    return 128 if _head_block(shape) <= 128 else 64


def _split_rows(shape: AttentionShape) -> int:
    most = _MAX_SPLIT_ROWS if shape.key_value_dim is None else _latent_rows()
    return max(min(int(triton.next_power_of_2(shape.group)), most), _MIN_SPLIT_ROWS)


def _latent_rows() -> int:
    return _LATENT_ROWS if _architecture() // 10 == 9 else _FEW_LATENT_ROWS


def _shared_rows(shape: AttentionShape) -> int:
    return _SHARED_ROWS if shape.key_value_dim is None else min(_SHARED_ROWS, _latent_rows())


def _can_share(shape: AttentionShape) -> bool:
    """Return whether requests share keys: with a window, they see different ones."""
    return shape.window is None and _shared_rows(shape) // shape.group > 1


def _grid(shape: AttentionShape, device: torch.device, num_programs: int | None = None) -> Grid:
    return Grid(
        chunk_tokens=_chunk_rows(shape) // shape.group,
        split_tokens=_split_rows(shape) // shape.group,
        shared_tokens=_shared_rows(shape) // shape.group if _can_share(shape) else 0,
        group=shape.group,
        num_kv_heads=shape.num_kv_heads,
        num_programs=num_programs or _programs_per_processor(shape) * _num_processors(device),
    )


def _programs_per_processor(shape: AttentionShape) -> int:
    """Return how many programs of the split kernel fit a multiprocessor."""
    return 2 if _head_block(shape) <= 128 else 1


def _num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; a small number without one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([slope * _LOG2_E for slope in slopes], dtype=torch.float32, device=device)


def _partials(limits: Limits, shape: AttentionShape, num_programs: int, device: torch.device) -> Partials:
    num_sums = limits.max_partials * shape.num_heads
    is_latent = shape.key_value_dim is not None
    num_totals = num_programs * 2 * _head_block(shape) * _chunk_rows(shape) if is_latent else 0
    return Partials(
        torch.empty(num_sums, shape.value_dim, dtype=torch.float32, device=device),
        torch.empty(num_sums, dtype=torch.float32, device=device),
        torch.empty(num_sums, dtype=torch.float32, device=device),
        torch.zeros(num_sums, dtype=torch.int32, device=device),
        torch.empty(num_totals, dtype=torch.float32, device=device),
    )


def _scoring(shape: AttentionShape, k_scale: float, v_scale: float) -> Scoring:
    factor = shape.scale * k_scale * _LOG2_E
    if shape.soft_cap is None:
        return Scoring(factor, 0.0, v_scale, shape.window or 0)
    return Scoring(2 * factor / shape.soft_cap, shape.soft_cap * _LOG2_E, v_scale, shape.window or 0)


def _form(shape: AttentionShape, cache_PSKH: Tensor, tile: int) -> Form:
    return Form(
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        head_dim=shape.value_dim,
        head_block=_head_block(shape),
        tail_dim=shape.head_dim - shape.value_dim,
        tail_block=max(int(triton.next_power_of_2(shape.head_dim - shape.value_dim)), _MIN_TAIL_BLOCK),
        block_size=cache_PSKH.shape[1],
        block_stride=cache_PSKH.stride(0),
        slot_stride=cache_PSKH.stride(1),
        # All groups of query heads have one latent key.
        kv_head_stride=cache_PSKH.stride(2) if shape.key_value_dim is None else 0,
        tile=tile,
        segment=SEGMENT,
        has_window=shape.window is not None,
        has_cap=shape.soft_cap is not None,
        has_slopes=shape.slopes is not None,
        is_chunked=shape.is_chunked,
        has_scales=cache_PSKH.dtype == torch.int8,
        is_causal=shape.is_causal,
    )


def _check(
    q_TNH: Tensor, k_cache_PSKH: Tensor, v_cache_PSKH: Tensor, shape: AttentionShape, expected: tuple[int, int, int]
) -> None:
    require(
        q_TNH.shape[1:] == (shape.num_heads, shape.head_dim) and k_cache_PSKH.shape[1:] == expected,
        f"paged_attention: queries {tuple(q_TNH.shape)} and a cache {tuple(k_cache_PSKH.shape)} for {shape}",
    )
    require(
        (*k_cache_PSKH.shape[:3], shape.value_dim) == v_cache_PSKH.shape
        and k_cache_PSKH.stride() == v_cache_PSKH.stride()
        and k_cache_PSKH.stride(3) == 1,
        "paged_attention: the caches are not of one shape with the dimensions of a head side by side",
    )
    require(
        k_cache_PSKH.dtype == v_cache_PSKH.dtype
        and can_hold(k_cache_PSKH, q_TNH.dtype)
        and (k_cache_PSKH.dtype != torch.int8 or shape.key_value_dim is None),
        f"paged_attention: queries of {q_TNH.dtype} for caches of {k_cache_PSKH.dtype} and {v_cache_PSKH.dtype}",
    )
