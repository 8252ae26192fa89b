"""The arguments of the attention kernels, in groups. Triton passes a named tuple as its members, in their order."""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """What every kernel reads and writes. Shapes are those of `PagedAttention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    tables: Tensor
    """Block numbers; a row for each request of the plan."""
    slopes: Tensor | None
    sinks: Tensor | None
    """Of each query head, float32."""
    query_starts: Tensor
    context_lens: Tensor


class Strides(NamedTuple):
    """Of the queries, in elements."""

    row: int
    head: int


class Scoring(NamedTuple):
    """Numbers that scores and results are computed with."""

    factor: float
    """Of products of queries and keys; with a cap, as `gpu_tile` needs it."""
    cap: float
    value_factor: float
    window: int


class Tiles(NamedTuple):
    """Lists of the tiles of rows of a plan."""

    requests: Tensor
    """-1 after the last tile."""
    first_rows: Tensor


class Work(NamedTuple):
    """Lists of the split requests of a plan, and of the segments that they share; see `gpu_plan.Layout`."""

    num_items: Tensor
    program_units: Tensor
    program_entries: Tensor
    entries: Tensor
    members: Tensor
    items: Tensor


class Partials(NamedTuple):
    """Sums of segments."""

    sums: Tensor
    weights: Tensor
    largest: Tensor
    num_done: Tensor
    """How many sums of a row are stored, where its first ones are. The kernel resets it to zeros."""
    totals: Tensor
    """Of each program, for keys with tails: sums of the segments so far, and those of one."""


class Form(NamedTuple):
    """What a kernel is compiled for: one argument that is a constant. Its members are plain numbers in a kernel."""

    num_kv_heads: int
    group: int
    """Query heads of a key head."""
    head_dim: int
    """Numbers of a value, and of a key without its tail."""
    head_block: int
    """`head_dim`, padded."""
    tail_dim: int
    """Numbers of a key behind its value, which is its beginning; 0: values are stored, as long as keys."""
    tail_block: int
    """`tail_dim`, padded."""
    block_size: int
    block_stride: int
    """Of the caches, in elements, like the next two. Constants, because they are multiplied for each row of a tile."""
    slot_stride: int
    kv_head_stride: int
    tile: int
    """Keys of a tile."""
    segment: int
    """Keys of a segment."""
    has_window: bool
    has_cap: bool
    has_slopes: bool
    is_chunked: bool
    has_scales: bool
    """Keys and values are 8-bit integers, with a scale for each."""
    is_span: bool
    """Rows see all keys behind them, see `AttentionShape.is_span`."""
    is_causal: bool
