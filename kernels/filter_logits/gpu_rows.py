"""How the sampling kernels divide rows of logits among programs, and how they read them.

A row is divided into parts of `PART` tokens, one program each, and a part into blocks of `BLOCK`. Both sizes are fixed,
so a row has the same bits in any batch. A row is read from the model's logits. If its request changes logits, it is
read from a float32 copy with the changes, divided by the temperature.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.top_k.gpu_order import order_key

PART = 4096
"""Tokens per program."""
BLOCK = 256
"""Tokens per block; the largest value of each block is stored."""
NUM_WARPS = 8


class Rows(NamedTuple):
    """Rows of logits; the parameters of their requests are in rows `slots` of a table's tensors. An argument of
    kernels.

    Names are without dimensions, because kernels see pointers.
    """

    logits: Tensor
    """(R, V), any float type; the logits of a row are contiguous."""
    changed: Tensor
    """(R, V), float32; read where `is_changed`."""
    is_changed: Tensor
    """(R), int32."""
    peaks: Tensor
    """(R, blocks), float32; the largest logit of every block."""
    bounds: Tensor
    """(R, blocks), float32; the largest bound of a score in every block."""
    slots: Tensor
    """(R), int64."""
    positions: Tensor
    """(R), int64; number of tokens before the one that is drawn."""
    temperature: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    stride: int
    """Elements from one row to the next."""
    width: int
    """Number of logits in a row."""

    def grid(self) -> tuple[int, int]:
        """Return the grid of a launch over all parts."""
        return -(-self.width // PART), self.logits.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks of a row, rounded up to a power of 2, because one program holds all their peaks."""
        num_blocks: int = triton.next_power_of_2(-(-self.width // BLOCK))
        return num_blocks

    @property
    def num_parts(self) -> int:
        """Parts of a row, rounded up to a power of 2."""
        num_parts: int = triton.next_power_of_2(-(-self.width // PART))
        return num_parts


def plain_rows(logits_RV: Tensor, peaks_RB: Tensor) -> Rows:
    """Return rows of final logits, without filters; row i uses slot i."""
    num_rows, count = logits_RV.shape
    integers_R = torch.zeros(num_rows, dtype=torch.int64, device=logits_RV.device)
    numbers_R = torch.zeros(num_rows, dtype=torch.float32, device=logits_RV.device)
    return Rows(
        logits=logits_RV,
        changed=logits_RV,
        is_changed=integers_R.int(),
        peaks=peaks_RB,
        bounds=peaks_RB,
        slots=torch.arange(num_rows, device=logits_RV.device),
        positions=integers_R,
        temperature=numbers_R + 1.0,
        seed=integers_R,
        top_k=integers_R.int(),
        top_p=integers_R.double() + 1.0,
        log_min_p=numbers_R - torch.inf,
        stride=logits_RV.stride(0),
        width=count,
    )


def new_peaks(logits_RV: Tensor) -> Tensor:
    """Allocate `Rows.peaks` or `Rows.bounds`."""
    num_rows, count = logits_RV.shape
    return torch.empty(num_rows, triton.cdiv(count, BLOCK), dtype=torch.float32, device=logits_RV.device)


@triton.jit
def divisor_of(rows, slot):
    """Return the temperature of a request, 1 for a greedy one."""
    temperature = tl.load(rows.temperature + slot)
    return tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def open_row(rows, row, slot):
    """Return the arguments of `load_logits`."""
    return (
        rows.logits + row * rows.stride,
        rows.changed + row * rows.width,
        tl.load(rows.is_changed + row) != 0,
        divisor_of(rows, slot),
    )


@triton.jit
def load_logits(opened, ids, is_in):
    """Return the final logits of some tokens, minus infinity where `is_in` is false."""
    source_ptr, changed_ptr, is_changed, divisor = opened
    logits = tl.load(source_ptr + ids, mask=is_in & (is_changed == 0), other=float("-inf")).to(tl.float32)
    changed = tl.load(changed_ptr + ids, mask=is_in & is_changed, other=float("-inf"))
    return tl.where(is_changed, changed, tl.div_rn(logits, divisor + tl.zeros_like(logits)))


@triton.jit
def is_filtered(rows, slot):
    """Return whether a request filters tokens by probability. Greedy requests need no filters."""
    top_k = tl.load(rows.top_k + slot)
    has_filter = ((top_k > 0) & (top_k < rows.width)) | (tl.load(rows.top_p + slot) < 1.0)
    has_filter = has_filter | (tl.load(rows.log_min_p + slot) > float("-inf"))
    return has_filter & (tl.load(rows.temperature + slot) != 0.0)


@triton.jit
def all_blocks(numbers_ptr, rows, row, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the stored number of every block of a row, minus infinity after the last one."""
    blocks = tl.arange(0, BLOCKS)
    num_blocks = tl.cdiv(rows.width, BLOCK)
    return tl.load(numbers_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))


@triton.jit
def store_largest(numbers_ptr, rows, row, first_block, values, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest value of each of `NUM` blocks; `values` has one row per block."""
    num_blocks = tl.cdiv(rows.width, BLOCK)
    blocks = first_block + tl.arange(0, NUM)
    tl.store(numbers_ptr + row * num_blocks + blocks, tl.max(values, axis=1), mask=blocks < num_blocks)


@triton.jit
def key_of_peaks(rows, row, first_block, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the order key of the largest logit of `NUM` blocks."""
    num_blocks = tl.cdiv(rows.width, BLOCK)
    blocks = first_block + tl.arange(0, NUM)
    peaks = tl.load(rows.peaks + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    return order_key(tl.max(peaks, axis=0))
