"""`paged_attention` on a GPU: launches the kernels over the lists of `gpu_plan`.

A single step is planned with `plan`. Where steps are captured as graphs, one `StepAttention` serves all of them: its
lists and sums have fixed addresses, and a captured launch executes whichever plan was last copied there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import e, log2
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.kernels.dispatch import UnsupportedDevice, require
from octavo.kernels.paged_attention import gpu_plan
from octavo.kernels.paged_attention.gpu_arguments import Form, Partials, Scoring, Strides, Tensors, Tiles, Work
from octavo.kernels.paged_attention.gpu_decode_kernel import split_kernel
from octavo.kernels.paged_attention.gpu_plan import SEGMENT, Counts, Grid, Integers, Ints, Layout, Limits
from octavo.kernels.paged_attention.gpu_prefill_kernel import chunk_kernel
from octavo.kernels.paged_attention.gpu_prefixes import Prefixes, SegmentLabels
from octavo.kernels.paged_attention.shape import AttentionShape

MAX_HEAD_DIM = 256

_LOG2_E = log2(e)
_MIN_HEAD_BLOCK, _MIN_SPLIT_ROWS, _MAX_SPLIT_ROWS = 64, 16, 64
"""Hopper's wgmma needs heads of 64 dimensions and 16 columns. For smaller tiles one of the two kernels would use
another instruction, which might round differently."""
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
        if shape.key_value_dim is not None:
            raise UnsupportedDevice("paged_attention with values that are the beginnings of keys is on CPUs only")
        device = block_table_RP.device
        self._grid = _grid(shape, device, num_programs)
        require(
            shape.head_dim <= MAX_HEAD_DIM and self._grid.chunk_tokens > 0,
            f"paged_attention: no tiles for {shape.group} heads of {shape.head_dim} dimensions for each key head",
        )
        self.layout = Layout.of(limits, self._grid)
        self.words_W = torch.empty(self.layout.num_words, dtype=torch.int32, device=device)
        self._shape = shape
        self._block_size = block_size
        self._block_table_RP = block_table_RP
        self._counts = Counts(0, 0, 0)
        self._architecture = _architecture()
        self._slopes_N = None if shape.slopes is None else _slopes(shape.slopes, device)
        self._partials = _partials(limits, shape, device)

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
        _check(q_TNH, k_cache_PSKH, v_cache_PSKH, self._shape, self._block_size)
        q_TNH = q_TNH if q_TNH.stride(2) == 1 else q_TNH.contiguous()
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
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
        tiling = _Tiling.of(self._shape, q_TNH.dtype, k_cache_PSKH.dtype, self._architecture)
        arguments = (
            tensors,
            _scoring(self._shape, k_scale, v_scale),
            Strides(*q_TNH.stride()[:2]),
            self._block_table_RP.stride(0),
            _form(self._shape, k_cache_PSKH, tiling.tile),
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
            widths = _split_rows(self._shape.group), _SHARED_ROWS if _can_share(self._shape) else 0
            split_kernel[(self._grid.num_programs,)](work, self._partials, *arguments, *widths, **tiling.split)
        if self._counts.num_tiles:
            tiles = Tiles(words[layout.tile_requests :], words[layout.tile_rows :])
            rows, has_wgmma = _chunk_rows(self._shape.head_dim), self._architecture // 10 == 9
            num_programs = self._counts.num_tiles * self._shape.num_kv_heads
            chunk_kernel[(num_programs,)](tiles, *arguments, rows, has_wgmma, **tiling.chunk)
        return out_TNH


def plan(
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_table_RP: Tensor,
    block_size: int,
    shape: AttentionShape,
) -> StepAttention:
    """See `octavo.kernels.paged_attention.plan`."""
    limits = gpu_plan.limits_of(_grid(shape, block_table_RP.device), query_starts, context_lens)
    step = StepAttention(shape, block_size, limits, block_table_RP)
    words = np.empty(step.layout.num_words, dtype=np.int32)
    prefixes = None
    if block_table_RP.device.type != "meta":
        labels = SegmentLabels.of(block_table_RP.cpu().numpy(), block_size, SEGMENT)
        prefixes = Prefixes(labels.labels_SX, np.arange(len(context_lens)))
    step.write_plan(words, query_starts, context_lens, prefixes)
    step.words_W.copy_(torch.from_numpy(words))
    return step


def workspace_bytes(context_len: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """See `octavo.kernels.paged_attention.workspace_bytes`. Sums are always float32."""
    num_sums = -(-context_len // SEGMENT) * (_split_rows(shape.group) // shape.group) * shape.num_heads
    return num_sums * (shape.head_dim + 2) * torch.float32.itemsize


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
        head_block = _head_block(shape.head_dim)
        # Consumer GPUs from Ampere to Blackwell have at most 99 KiB of shared memory per program.
        tile = 64 if 90 <= architecture < 120 else 32
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


def _head_block(head_dim: int) -> int:
    return max(int(triton.next_power_of_2(head_dim)), _MIN_HEAD_BLOCK)


def _chunk_rows(head_dim: int) -> int:
    return 128 if _head_block(head_dim) <= 128 else 64


def _split_rows(group: int) -> int:
    return max(min(int(triton.next_power_of_2(group)), _MAX_SPLIT_ROWS), _MIN_SPLIT_ROWS)


def _can_share(shape: AttentionShape) -> bool:
    """Return whether requests share keys: with a window, they see different ones."""
    return shape.window is None and _SHARED_ROWS // shape.group > 1


def _grid(shape: AttentionShape, device: torch.device, num_programs: int | None = None) -> Grid:
    return Grid(
        chunk_tokens=_chunk_rows(shape.head_dim) // shape.group,
        split_tokens=_split_rows(shape.group) // shape.group,
        shared_tokens=_SHARED_ROWS // shape.group if _can_share(shape) else 0,
        group=shape.group,
        num_kv_heads=shape.num_kv_heads,
        num_programs=num_programs or _programs_per_processor(shape) * _num_processors(device),
    )


def _programs_per_processor(shape: AttentionShape) -> int:
    """Return how many programs of the split kernel fit a multiprocessor."""
    return 2 if _head_block(shape.head_dim) <= 128 else 1


def _num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; a small number without one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([slope * _LOG2_E for slope in slopes], dtype=torch.float32, device=device)


def _partials(limits: Limits, shape: AttentionShape, device: torch.device) -> Partials:
    num_sums = limits.max_partials * shape.num_heads
    return Partials(
        torch.empty(num_sums, shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(num_sums, dtype=torch.float32, device=device),
        torch.empty(num_sums, dtype=torch.float32, device=device),
        torch.zeros(num_sums, dtype=torch.int32, device=device),
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
        head_dim=shape.head_dim,
        head_block=_head_block(shape.head_dim),
        block_size=cache_PSKH.shape[1],
        block_stride=cache_PSKH.stride(0),
        slot_stride=cache_PSKH.stride(1),
        kv_head_stride=cache_PSKH.stride(2),
        tile=tile,
        segment=SEGMENT,
        has_window=shape.window is not None,
        has_cap=shape.soft_cap is not None,
        has_slopes=shape.slopes is not None,
        is_chunked=shape.is_chunked,
    )


def _check(q_TNH: Tensor, k_cache_PSKH: Tensor, v_cache_PSKH: Tensor, shape: AttentionShape, block_size: int) -> None:
    expected = (block_size, shape.num_kv_heads, shape.head_dim)
    require(
        q_TNH.shape[1:] == (shape.num_heads, shape.head_dim) and k_cache_PSKH.shape[1:] == expected,
        f"paged_attention: queries {tuple(q_TNH.shape)} and a cache {tuple(k_cache_PSKH.shape)} for {shape}",
    )
    require(
        k_cache_PSKH.shape == v_cache_PSKH.shape
        and k_cache_PSKH.stride() == v_cache_PSKH.stride()
        and k_cache_PSKH.stride(3) == 1,
        "paged_attention: the caches are not of one shape with the dimensions of a head side by side",
    )
    require(
        k_cache_PSKH.dtype == v_cache_PSKH.dtype and k_cache_PSKH.dtype in (q_TNH.dtype, torch.float8_e4m3fn),
        f"paged_attention: queries of {q_TNH.dtype} for caches of {k_cache_PSKH.dtype} and {v_cache_PSKH.dtype}",
    )
