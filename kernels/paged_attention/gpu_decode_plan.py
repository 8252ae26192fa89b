"""Makes the plan of a decode step on the device, for steps whose lengths the host does not know.

The plan equals the one that `gpu_plan.write` makes for requests with one row each that share no segments.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.paged_attention.gpu_plan import ENTRY_WORDS, SEGMENT, Grid, Layout
from octavo.kernels.paged_attention.shape import AttentionShape

_ENTRY_WORDS = tl.constexpr(ENTRY_WORDS)
_SEGMENT = tl.constexpr(SEGMENT)


class _Lists(NamedTuple):
    """The lists of a plan that are written here; see `gpu_plan.Layout`."""

    num_items: Tensor
    program_units: Tensor
    program_entries: Tensor
    entries: Tensor


def plan_decodes(words_W: Tensor, layout: Layout, grid: Grid, shape: AttentionShape, context_lens_R: Tensor) -> None:
    """Write the plan of R requests that compute one row each.

    Args:
        words_W: int32, on the device.
        layout: offsets of the lists.
        grid: tiles and programs of the kernels; a tile of the split kernel must have room for a request.
        shape: attention of the model.
        context_lens_R: int64; keys of each request, including those of this step. 0: padding, only after all requests.
    """
    lists = _Lists(
        words_W[layout.num_items :],
        words_W[layout.program_units :],
        words_W[layout.program_entries :],
        words_W[layout.entries :],
    )
    window = shape.window or 0
    # The first key of a request is at this distance before its last key.
    reach = window if shape.is_causal else window // 2 + 1
    _plan_decodes_kernel[(1,)](
        lists,
        context_lens_R,
        len(context_lens_R),
        layout.limits.max_partials,
        grid.num_programs,
        grid.num_kv_heads,
        reach,
        HAS_WINDOW=shape.window is not None,
        IS_CHUNKED=shape.is_chunked,
        REQUESTS=triton.next_power_of_2(layout.limits.max_requests),
        PROGRAMS=triton.next_power_of_2(grid.num_programs),
        num_warps=8,
    )


_NUMBERS = ["num_requests", "max_partials", "num_programs", "num_kv_heads", "reach"]


@triton.jit(do_not_specialize=_NUMBERS)  # long: the lists one after another, from the same numbers
def _plan_decodes_kernel(
    lists,
    context_lens_ptr,
    num_requests,
    max_partials,
    num_programs,
    num_kv_heads,
    reach,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    REQUESTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """A single program writes all lists. Each request is one entry, whose fields `ENTRY_WORDS` documents."""
    requests = tl.arange(0, REQUESTS)
    is_there = requests < num_requests
    lens = tl.load(context_lens_ptr + requests, mask=is_there, other=0).to(tl.int32)
    firsts = tl.zeros_like(lens)
    if IS_CHUNKED:
        firsts = tl.maximum(lens - 1, 0) // reach * reach // _SEGMENT
    elif HAS_WINDOW:
        firsts = tl.maximum(lens - reach, 0) // _SEGMENT
    num_own = tl.cdiv(lens, _SEGMENT) - firsts
    ends = tl.cumsum(num_kv_heads * num_own)
    num_units = tl.max(ends)
    ends_of_partials = tl.cumsum(num_own)
    num_partials = tl.where(ends_of_partials <= max_partials, num_own, 0)
    entries = lists.entries + requests * _ENTRY_WORDS
    tl.store(entries, requests, mask=is_there)
    tl.store(entries + 1, requests, mask=is_there)  # first row: each request has one row
    tl.store(entries + 2, 1, mask=is_there)
    tl.store(entries + 3, lens, mask=is_there)
    tl.store(entries + 4, firsts, mask=is_there)
    tl.store(entries + 5, ends - num_kv_heads * num_own, mask=is_there)  # first unit
    tl.store(entries + 6, -1, mask=is_there)  # no partial sums, unless a program begins within a key head
    tl.store(entries + 7, tl.cumsum(num_partials) - num_partials - firsts, mask=is_there)
    tl.debug_barrier()

    # Binary search for the request of each program's first unit: the last request that begins at or before it.
    programs = tl.arange(0, PROGRAMS)
    begins = tl.minimum(programs * tl.cdiv(num_units, num_programs), num_units)
    has_units = (programs < num_programs) & (begins < num_units)
    found = tl.zeros_like(programs)
    step = REQUESTS // 2
    while step > 0:
        following = found + step
        is_request = has_units & (following < num_requests)
        first_unit = tl.load(lists.entries + following * _ENTRY_WORDS + 5, mask=is_request, other=0)
        found = tl.where(is_request & (first_unit <= begins), following, found)
        step = step // 2
    found_entries = lists.entries + found * _ENTRY_WORDS
    len_of_found = tl.load(found_entries + 3, mask=has_units, other=1)
    first_of_found = tl.load(found_entries + 4, mask=has_units, other=0)
    first_unit = tl.load(found_entries + 5, mask=has_units, other=0)
    within = (begins - first_unit) % (tl.cdiv(len_of_found, _SEGMENT) - first_of_found)
    # If there is no memory for its sums, a key head of a request is not split.
    limit = tl.max(tl.where(ends_of_partials <= max_partials, requests, -1))
    is_divisible = found <= limit
    tl.store(found_entries + 6, first_of_found, mask=has_units & is_divisible & (within > 0))
    begins -= tl.where(has_units & (is_divisible == 0), within, 0)
    tl.store(lists.program_units + programs, begins, mask=programs < num_programs)
    tl.store(lists.program_units + num_programs, num_units)
    tl.store(lists.program_entries + programs, found, mask=programs < num_programs)
    tl.store(lists.num_items, 0)
