"""The native KV cache for tests: read slot by slot, written and attended to by its operations."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.native import direct
from octavo.kernels.native.arguments import GroupArguments, Matrix, StepArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.paged_attention.layout import GROUP_SLOTS, CacheLayout, LayoutArguments
from octavo.kernels.paged_attention.native import (
    PagedAttentionArguments,
    PlanAttentionArguments,
    ShapeArguments,
    workspace_bytes,
)
from octavo.kernels.store_kv.native import StoreKvArguments


def numbers(buffer: Tensor, layout: CacheLayout, *, keys: bool) -> Tensor:
    """Return the stored numbers with padding, shape (slots, heads, padded dimension); int8 without the offset."""
    heads, dim = layout.num_kv_heads, layout.padded_dim
    tiles = _tiles(buffer, layout)[..., : GROUP_SLOTS * dim * layout.dtype.itemsize].view(layout.dtype)
    step = {torch.bfloat16: 2, torch.float8_e4m3fn: 2, torch.int8: 4}.get(layout.dtype, 1)
    if layout.dtype == torch.int8:
        tiles = tiles ^ -128  # stored with 128 added, as unsigned
    if keys:
        by_slot = tiles.unflatten(2, (dim // step, GROUP_SLOTS, step)).permute(0, 3, 1, 2, 4)
    else:
        by_slot = tiles.unflatten(2, (GROUP_SLOTS // step, dim, step)).permute(0, 2, 4, 1, 3)
    return by_slot.reshape(-1, heads, dim)


def scales(buffer: Tensor, layout: CacheLayout) -> Tensor:
    """Return the scales of an int8 cache, shape (slots, heads)."""
    after = GROUP_SLOTS * layout.padded_dim
    return _tiles(buffer, layout)[..., after:].view(torch.float32).transpose(1, 2).reshape(-1, layout.num_kv_heads)


def read(buffer: Tensor, layout: CacheLayout, *, keys: bool) -> Tensor:
    """Return the values in the slots of a buffer as float32, shape (slots, heads, head dimension).

    Values of 8-bit floats are relative to the scale that they were stored with.
    """
    rows = numbers(buffer, layout, keys=keys).float()[..., : layout.head_dim]
    return rows * scales(buffer, layout).unsqueeze(-1) if layout.dtype == torch.int8 else rows


def _tiles(buffer: Tensor, layout: CacheLayout) -> Tensor:
    return buffer.view(-1, layout.num_kv_heads, GROUP_SLOTS * layout.slot_bytes // layout.num_kv_heads)


@dataclass
class NativeCache:
    """One layer's cache whose unused slots hold NaN, with the operations that work on it."""

    library: NativeLibrary
    layout: CacheLayout
    num_blocks: int
    num_threads: int = 1
    scales: tuple[float, float] = (1.0, 1.0)
    """Scales of keys and values in 8-bit floats."""

    def __post_init__(self) -> None:
        self.k, self.v = self.layout.allocate(self.num_blocks)
        self.k.fill_(0xFF)
        self.v.fill_(0xFF)  # the same buffer if values are prefixes of keys

    def store(self, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        """Run `store_kv` for rows of keys and values (rows, heads * head dimension; float32)."""
        arguments = StoreKvArguments(
            Matrix.of(k),
            Matrix() if v is None else Matrix.of(v),
            self.k.data_ptr(),
            self.v.data_ptr(),
            LayoutArguments.of(self.layout),
            *self.scales,
        )
        step = StepArguments(num_rows=len(slots), groups=ctypes.pointer(GroupArguments(slots=slots.data_ptr())))
        direct.run(self.library, "store_kv", arguments, step=step, num_threads=self.num_threads)

    def attend(
        self,
        q: Tensor,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        block_table: Tensor,
        shape: AttentionShape,
        out_dtype: torch.dtype = torch.float32,
        sinks: Tensor | None = None,
        is_span_R: Sequence[bool] | None = None,
    ) -> Tensor:
        """Run `plan_attention` and `paged_attention` for queries (rows, heads * head dimension; float32)."""
        mirrored = ShapeArguments.of(shape, self.layout)
        limits = len(q), max(context_lens), self.num_threads
        num_bytes = workspace_bytes(self.library, mirrored, *limits)
        workspace = torch.full((num_bytes + 64,), 0xFF, dtype=torch.uint8)
        address = -(-workspace.data_ptr() // 64) * 64
        starts, lens = (torch.tensor(list(numbers)) for numbers in (query_starts, context_lens))
        spans = None if is_span_R is None else torch.tensor(is_span_R, dtype=torch.int8)
        assert block_table.dtype == torch.int32 and block_table.stride(1) == 1
        step = StepArguments(
            num_rows=len(q),
            num_requests=len(lens),
            query_starts=starts.data_ptr(),
            context_lens=lens.data_ptr(),
            is_span=None if spans is None else spans.data_ptr(),
            groups=ctypes.pointer(
                GroupArguments(block_table=block_table.data_ptr(), block_table_width=block_table.stride(0))
            ),
        )
        out = torch.full((len(q), shape.num_heads * shape.value_dim), float("nan"), dtype=out_dtype)
        plan = PlanAttentionArguments(mirrored, ctypes.c_void_p(address), num_bytes, max(context_lens))
        caches = self.k.data_ptr(), self.v.data_ptr()
        sinks_address = None if sinks is None else sinks.data_ptr()
        run = PagedAttentionArguments(
            Matrix.of(q), Matrix.of(out), *caches, mirrored, address, sinks_address, *self.scales
        )
        for name, arguments in (("plan_attention", plan), ("paged_attention", run)):
            direct.run(self.library, name, arguments, step=step, num_threads=self.num_threads)
        return out
