"""The kernels of `logprobs`: one over parts of all rows, one over the rows."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.filter_logits.gpu_rows import divisor_of, load_logits, open_row
from octavo.kernels.logprobs.memory import IS_LOGIT, PROCESSED
from octavo.kernels.top_k.gpu_order import is_kept, order_key

_PROCESSED, _IS_LOGIT = tl.constexpr(PROCESSED), tl.constexpr(IS_LOGIT)
_MAX_ID = tl.constexpr(2**31 - 1)


class Report(NamedTuple):
    """Reports of the rows, by slot, and the drawn tokens. An argument of kernels."""

    modes: Tensor
    """int32, by slot; see `memory.py`."""
    num_top: Tensor
    """int32, by slot; at most `MAX_TOP`."""
    raw: Tensor
    """(R, V), the model's logits, any float type."""
    raw_stride: int
    token_ids: Tensor
    """int64, by row; -1 is treated as token 0."""
    least_keys: Tensor
    """Cut of the filters, by row, like the next one."""
    last_ids: Tensor


@triton.jit
def _open_values(rows, report, row, slot, ruled_out):
    """Return the arguments of `_values_of`, and the drawn token."""
    opened = open_row(rows, row, slot)
    token_id = tl.maximum(tl.load(report.token_ids + row), 0)
    bound = tl.div_rn(ruled_out, divisor_of(rows, slot))
    # A ruled out token is drawn only if all tokens are ruled out. Then all of them are reported.
    bound = tl.where(load_logits(opened, token_id, token_id < rows.width) > bound, bound, float("-inf"))
    is_processed = (tl.load(report.modes + slot) & _PROCESSED) != 0
    least_key = tl.load(report.least_keys + row).to(tl.uint32, bitcast=True)
    last_id = tl.load(report.last_ids + row)
    source = (report.raw + row * report.raw_stride, opened, is_processed, bound, least_key, last_id)
    return source, token_id


@triton.jit
def _values_of(source, ids, is_in):
    """Return the reported logits of tokens, minus infinity where `is_in` is false."""
    raw_ptr, opened, is_processed, bound, least_key, last_id = source
    if is_processed:
        values = load_logits(opened, ids, is_in)
        kept = is_kept(order_key(values), ids, least_key, last_id) & (values > bound)
        values = tl.where(kept, values, float("-inf"))
    else:
        values = tl.load(raw_ptr + ids, mask=is_in, other=float("-inf")).to(tl.float32)
    return values


@triton.jit
def _ordered(values, ids):
    """Return positive int64 keys that sort tokens by likelihood: by value, ties by descending id."""
    return (order_key(values).to(tl.int64) << 31) | (_MAX_ID - ids)


@triton.jit
def report_part_kernel(
    rows,
    report,
    ruled_out,
    largest_ptr,
    sums_ptr,
    num_before_ptr,
    peaks_ptr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store for a part: the largest value, the sum of exponentials relative to it, how many tokens precede the row's
    token, and the first token of every block in the order."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(rows.slots + row)
    if tl.load(report.modes + slot) != 0:
        source, token_id = _open_values(rows, report, row, slot, ruled_out)
        own = _ordered(_values_of(source, token_id, token_id < rows.width), token_id)
        blocks = part * (PART // BLOCK) + tl.arange(0, PART // BLOCK)
        ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = _values_of(source, ids, ids < rows.width)
        ordered = tl.where(ids < rows.width, _ordered(values, ids), 0)
        largest = tl.max(tl.max(values, axis=1), axis=0)
        # A part of minus infinities has a sum of 0.
        shift = tl.where(largest > float("-inf"), largest, 0.0)
        place = row * tl.num_programs(0) + part
        tl.store(largest_ptr + place, largest)
        tl.store(sums_ptr + place, tl.sum(tl.sum(tl.exp(values - shift), axis=1), axis=0))
        tl.store(num_before_ptr + place, tl.sum(tl.sum((ordered > own).to(tl.int32), axis=1), axis=0))
        num_blocks = tl.cdiv(rows.width, BLOCK)
        tl.store(peaks_ptr + row * num_blocks + blocks, tl.max(ordered, axis=1), mask=blocks < num_blocks)


@triton.jit
def _find_top(rows, source, peaks, num_top, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, MAX_TOP: tl.constexpr):
    """Return the ids of the most likely tokens. `peaks` has the first token in the order of each block."""
    places, blocks = tl.arange(0, MAX_TOP), tl.arange(0, BLOCKS)
    found = tl.full((MAX_TOP,), 0, tl.int64)
    for place in range(num_top):
        best = tl.max(peaks, axis=0)
        token_id = _MAX_ID - (best & _MAX_ID)
        found = tl.where(places == place, token_id, found)
        ids = token_id // BLOCK * BLOCK + tl.arange(0, BLOCK)
        ordered = _ordered(_values_of(source, ids, ids < rows.width), ids)
        following = tl.max(tl.where((ids < rows.width) & (ordered < best), ordered, 0), axis=0)
        peaks = tl.where(blocks == token_id // BLOCK, following, peaks)
    return found


@triton.jit
def report_row_kernel(
    rows,
    report,
    ruled_out,
    largest_ptr,
    sums_ptr,
    num_before_ptr,
    peaks_ptr,
    memory,
    num_parts,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_TOP: tl.constexpr,
):
    """Write the log-sum-exp of a row, the log-probability and the rank of its token, and the most likely tokens."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows.slots + row)
    mode = tl.load(report.modes + slot)
    if mode != 0:
        source, token_id = _open_values(rows, report, row, slot, ruled_out)
        parts = tl.arange(0, PARTS)
        is_in, places = parts < num_parts, row * num_parts + parts
        largest = tl.load(largest_ptr + places, mask=is_in, other=float("-inf"))
        sums = tl.load(sums_ptr + places, mask=is_in, other=0.0).to(tl.float64)
        top = tl.max(largest, axis=0)
        total = tl.sum(sums * tl.exp(largest - top).to(tl.float64), axis=0)
        normalizer = top.to(tl.float64) + tl.log(total)
        tl.store(memory.normalizers + row, normalizer)
        rank = tl.sum(tl.load(num_before_ptr + places, mask=is_in, other=0), axis=0) + 1
        tl.store(memory.ranks + row, rank)
        subtracted = tl.where((mode & _IS_LOGIT) != 0, 0.0, normalizer)
        own = _values_of(source, token_id, token_id < rows.width).to(tl.float64) - subtracted
        tl.store(memory.chosen + row, own.to(tl.float32))

        blocks, num_blocks = tl.arange(0, BLOCKS), tl.cdiv(rows.width, BLOCK)
        peaks = tl.load(peaks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=0)
        num_top = tl.minimum(tl.load(report.num_top + slot), rows.width)
        top_ids = _find_top(rows, source, peaks, num_top, BLOCKS, BLOCK, MAX_TOP)
        entries = tl.arange(0, MAX_TOP)
        values = _values_of(source, top_ids, entries < num_top).to(tl.float64) - subtracted
        tl.store(memory.top_ids + row * MAX_TOP + entries, top_ids, mask=entries < num_top)
        tl.store(memory.top + row * MAX_TOP + entries, values.to(tl.float32), mask=entries < num_top)
