"""`paged_attention` on a GPU: launches the kernels over the work lists of `gpu_plan`.

A single step is planned with `plan`. If steps are captured as CUDA graphs, one `StepAttention` serves all of them: its
lists and sums have fixed addresses, and a captured launch executes the plan that was last copied there.
"""

from collections.abc import Sequence
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
from octavo.kernels.paged_attention.gpu_decode_plan import plan_decodes
from octavo.kernels.paged_attention.gpu_latent_kernel import latent_chunk_kernel
from octavo.kernels.paged_attention.gpu_plan import SEGMENT, Counts, Grid, Integers, Ints, Layout, Limits
from octavo.kernels.paged_attention.gpu_prefill_kernel import chunk_kernel
from octavo.kernels.paged_attention.gpu_prefixes import Prefixes, SegmentLabels
from octavo.kernels.paged_attention.gpu_tile import VALUE_SCALE_FACTOR
from octavo.kernels.paged_attention.gpu_tiling import (
    Tiling,
    architecture,
    can_share,
    chunk_rows,
    head_block,
    shared_rows,
    split_rows,
    tiled,
)
from octavo.kernels.paged_attention.int8_cache import can_hold
from octavo.kernels.paged_attention.shape import AttentionShape

_LOG2_E = log2(e)
_MIN_TAIL_BLOCK = 16
"""Tensor cores sum 16 products at once."""
_LEAST_SPARE_TILES, _TOKENS_OF_A_PROMPT = 8, 32
"""Programs of a graph in addition to those of full tiles: the last tile of each prompt, for prompts of this many
tokens."""


class StepAttention:
    """The attention of successive steps, at fixed addresses.

    For each step: call `write_plan` on the host, copy its words to `words_W`, and call the object once per layer. A
    graph captures that call after `launch_for`, and can then compute every plan with at most that many chunk tiles. A
    plan of decodes has none.

    Args:
        shape: attention of the model.
        block_size: token slots of a block.
        limits: limits of the plans.
        block_table_RP: int32; one row for each of `limits.max_requests`, in the order of the plans.
        num_programs: programs of the split kernel; as many as the GPU runs at once if `None`. Does not change the bits.

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
        shape = tiled(shape)
        self._grid = _grid(shape, device, num_programs)
        self.layout = Layout.of(limits, self._grid)
        self.words_W = torch.empty(self.layout.num_words, dtype=torch.int32, device=device)
        self._shape = shape
        self._block_size = block_size
        self._block_table_RP = block_table_RP
        self._counts = Counts(0, 0, 0)
        self._architecture = architecture()
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

        The calls that follow launch the kernels that this plan needs.
        """
        self._counts = gpu_plan.write(words, self.layout, self._grid, self._shape, query_starts, context_lens, prefixes)
        return self._counts

    def plan_decodes(self, context_lens_R: Tensor) -> None:
        """Write to `words_W`, on the device, the plan of requests with one row each; see `gpu_decode_plan`.

        The calls that follow launch the kernels that it needs. A graph may capture both.
        """
        require(self._grid.split_tokens > 0, f"paged_attention: decodes of {self._shape} are not split")
        self.launch_for(0)
        plan_decodes(self.words_W, self.layout, self._grid, self._shape, context_lens_R)

    def usual_tiles(self, num_tokens: int) -> int:
        """Return the number of chunk tiles for which a graph of this many tokens has programs.

        A step of many short prompts may need more. Each program without a tile costs a fraction of a microsecond.
        """
        spare = max(_LEAST_SPARE_TILES, num_tokens // _TOKENS_OF_A_PROMPT)
        return min(num_tokens // self._grid.chunk_tokens + spare, self.layout.tile_rows - self.layout.tile_requests)

    def launch_for(self, num_tiles: int) -> None:
        """Make the next calls launch what any plan with at most `num_tiles` chunk tiles needs, until `write_plan` is
        called."""
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

        The caches may be views in which the slots of a head are contiguous, instead of the heads of a slot. Rows of
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
        tiling = Tiling.of(shape, q_TNH.dtype, k_cache_PSKH.dtype, self._architecture)
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
            widths = split_rows(shape), shared_rows(shape) if can_share(shape) else 0
            split_kernel[(self._grid.num_programs,)](work, self._partials, *arguments, *widths, **tiling.split)
        if self._counts.num_tiles:
            self._launch_chunks(arguments, tiling)
        return out_TNH

    def _launch_chunks(self, arguments: tuple[Any, ...], tiling: Tiling) -> None:
        """Launch the kernel of prompts and chunks."""
        shape, layout, num_tiles = self._shape, self.layout, self._counts.num_tiles
        tiles = Tiles(self.words_W[layout.tile_requests :], self.words_W[layout.tile_rows :])
        rows, num_programs = chunk_rows(shape), num_tiles * shape.num_kv_heads
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
    limits = gpu_plan.limits_of(_grid(tiled(shape), block_table_RP.device), query_starts, context_lens)
    step = StepAttention(shape, block_size, limits, block_table_RP)
    words = np.empty(step.layout.num_words, dtype=np.int32)
    prefixes = None
    if block_table_RP.device.type != "meta":
        labels = SegmentLabels.of(block_table_RP.cpu().numpy(), block_size, SEGMENT)
        prefixes = Prefixes(labels.labels_SX, np.arange(len(context_lens)))
    step.write_plan(words, query_starts, context_lens, prefixes)
    step.words_W.copy_(torch.from_numpy(words))
    return step


def _grid(shape: AttentionShape, device: torch.device, num_programs: int | None = None) -> Grid:
    return Grid(
        chunk_tokens=chunk_rows(shape) // shape.group,
        split_tokens=0 if shape.is_span else split_rows(shape) // shape.group,
        shared_tokens=shared_rows(shape) // shape.group if can_share(shape) else 0,
        group=shape.group,
        num_kv_heads=shape.num_kv_heads,
        num_programs=num_programs or _programs_per_processor(shape) * _num_processors(device),
    )


def _programs_per_processor(shape: AttentionShape) -> int:
    """Return how many programs of the split kernel fit on a multiprocessor."""
    return 2 if head_block(shape) <= 128 else 1


def _num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; a small number if there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([slope * _LOG2_E for slope in slopes], dtype=torch.float32, device=device)


def _partials(limits: Limits, shape: AttentionShape, num_programs: int, device: torch.device) -> Partials:
    num_sums = limits.max_partials * shape.num_heads
    is_latent = shape.key_value_dim is not None
    num_totals = num_programs * 2 * head_block(shape) * chunk_rows(shape) if is_latent else 0
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
        head_block=head_block(shape),
        tail_dim=shape.head_dim - shape.value_dim,
        tail_block=max(int(triton.next_power_of_2(shape.head_dim - shape.value_dim)), _MIN_TAIL_BLOCK),
        block_size=cache_PSKH.shape[1],
        block_stride=cache_PSKH.stride(0),
        slot_stride=cache_PSKH.stride(1),
        # All groups of query heads share one latent key.
        kv_head_stride=cache_PSKH.stride(2) if shape.key_value_dim is None else 0,
        tile=tile,
        segment=SEGMENT,
        has_window=shape.window is not None,
        has_cap=shape.soft_cap is not None,
        has_slopes=shape.slopes is not None,
        is_chunked=shape.is_chunked,
        has_scales=cache_PSKH.dtype == torch.int8,
        is_span=shape.is_span,
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
