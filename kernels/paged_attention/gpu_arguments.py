"""The arguments of the attention kernels, in groups. Triton passes a named tuple as its members, in order."""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """Tensors that every kernel reads and writes. Shapes are those of `PagedAttention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    tables: Tensor
    """Block numbers; one row for each request of the plan."""
    slopes: Tensor | None
    sinks: Tensor | None
    """Sink of each query head, float32."""
    query_starts: Tensor
    context_lens: Tensor


class Strides(NamedTuple):
    """Strides of the queries, in elements."""

    row: int
    head: int


class Scoring(NamedTuple):
    """Scalars for computing scores and results."""

    factor: float
    """Factor of the products of queries and keys; with a soft cap, in the form that `gpu_tile` needs."""
    cap: float
    value_factor: float
    window: int


class Tiles(NamedTuple):
    """Lists of a plan's tiles of rows."""

    requests: Tensor
    """Request of each tile; -1 after the last tile."""
    first_rows: Tensor


class Work(NamedTuple):
    """Lists of a plan's split requests, and of the segments that they share; see `gpu_plan.Layout`."""

    num_items: Tensor
    program_units: Tensor
    program_entries: Tensor
    entries: Tensor
    members: Tensor
    items: Tensor


class Partials(NamedTuple):
    """Partial sums of segments."""

    sums: Tensor
    weights: Tensor
    largest: Tensor
    num_done: Tensor
    """For each row, the number of stored sums, at the index of its first one. The kernel resets it to zeros."""
    totals: Tensor
    """Per program, for keys with tails: sums of the segments so far, and those of the current one."""


class Form(NamedTuple):
    """Compile-time parameters of a kernel, passed as one constexpr. Its members are plain numbers in the kernel."""

    num_kv_heads: int
    group: int
    """Query heads per key head."""
    head_dim: int
    """Dimensions of a value, and of a key without its tail."""
    head_block: int
    """`head_dim`, padded."""
    tail_dim: int
    """Dimensions of a key after its value, if the value is the beginning of the key. 0: values are stored
    separately."""
    tail_block: int
    """`tail_dim`, padded."""
    block_size: int
    block_stride: int
    """Block stride of the caches, in elements. This and the next two are constants, because every row of a tile uses
    them."""
    slot_stride: int
    kv_head_stride: int
    tile: int
    """Number of keys in a tile."""
    segment: int
    """Number of keys in a segment."""
    has_window: bool
    has_cap: bool
    has_slopes: bool
    is_chunked: bool
    has_scales: bool
    """Whether keys and values are 8-bit integers with a scale each."""
    is_span: bool
    """Whether rows attend to all later keys too, see `AttentionShape.is_span`."""
    is_causal: bool
