"""`all_reduce` on GPUs with peer access: each rank reads the parts of all ranks, in one kernel.

This is TensorRT-LLM's one-shot strategy: a rank stores its part where all ranks can read it, signals them, waits for
their signals, and sums all parts itself.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.rms_norm.gpu import normalized, num_warps

NUM_PROGRAMS = 48
"""Maximum number of programs. They wait for one another, so all must be resident at once on the smallest GPU; each
program computes several rows."""
_NUM_SLOTS = 2
"""Two slots: a rank may store its next part while another rank still reads the previous one."""


def flag_bytes(size: int) -> int:
    """Return the bytes at the beginning of a rank's memory that hold the signals of `size` ranks."""
    return size * NUM_PROGRAMS * torch.int64.itemsize


def one_shot_bytes(max_rows: int, width: int, part_dtype: torch.dtype, size: int) -> int:
    """Return the bytes of memory that each of `size` ranks needs."""
    return flag_bytes(size) + _NUM_SLOTS * max_rows * width * part_dtype.itemsize


class OneShotAllReduce:
    """One rank's end of the all-reduce. All ranks make the same calls in the same order, each on one stream.

    The sum of the first half of the ranks is added to that of the second half, and so on recursively, in float32; it is
    rounded once. So neither its bits nor its order depend on the number of rows.

    Args:
        addresses: address of `one_shot_bytes` of memory of every rank, as mapped on this GPU; zeroed initially.
        rank: index of this rank.
        max_rows: maximum rows of a sum.
        width: columns of a sum.
        dtype: dtype of the sums.
        part_dtype: dtype of the parts: the same, or float32.
        device: device of this rank.
        keep_alive: owner of the memory, kept alive.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        rank: int,
        *,
        max_rows: int,
        width: int,
        dtype: torch.dtype,
        part_dtype: torch.dtype,
        device: torch.device,
        keep_alive: object = None,
    ) -> None:
        self._keep_alive = keep_alive
        self.max_rows, self.width, self.dtype, self._part_dtype = max_rows, width, dtype, part_dtype
        self._rank, self._size = rank, len(addresses)
        self._addresses_N = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._num_calls_P = torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=device)
        """Number of calls of each program; on the device, so that a replayed graph keeps counting."""

    def can_sum(self, partial_TD: Tensor) -> bool:
        """Return whether it can sum a part of this shape and dtype."""
        num_rows, width = partial_TD.shape
        return num_rows <= self.max_rows and width == self.width and partial_TD.dtype == self._part_dtype

    def all_reduce(self, partial_TD: Tensor, bias_D: Tensor | None) -> Tensor:
        """Return the sum of all ranks' `partial`, plus the bias.

        Raises:
            ShapeError: see `can_sum`.
        """
        out_TD = torch.empty_like(partial_TD, dtype=self.dtype)
        self._launch(partial_TD, bias_D, None, None, None, out_TD, 0.0)
        return out_TD

    def all_reduce_add_rms_norm(
        self, partial_TD: Tensor, bias_D: Tensor | None, x_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `add_rms_norm` of `x` and the sum of all ranks' `partial` plus the bias, with the bits of both.

        Raises:
            ShapeError: see `can_sum`.
        """
        total_TD, out_TD = (torch.empty_like(partial_TD, dtype=self.dtype) for _ in range(2))
        self._launch(partial_TD, bias_D, x_TD.contiguous(), weight_D.contiguous(), total_TD, out_TD, eps)
        return total_TD, out_TD

    def _launch(
        self,
        partial_TD: Tensor,
        bias_D: Tensor | None,
        x_TD: Tensor | None,
        weight_D: Tensor | None,
        total_TD: Tensor | None,
        out_TD: Tensor,
        eps: float,
    ) -> None:
        num_rows = len(partial_TD)
        require(self.can_sum(partial_TD), f"all_reduce: {tuple(partial_TD.shape)}, at most {self.max_rows} rows")
        if not num_rows:
            return
        block = triton.next_power_of_2(self.width)
        _all_reduce_kernel[(min(num_rows, NUM_PROGRAMS),)](
            partial_TD.contiguous(),
            bias_D,
            x_TD,
            weight_D,
            total_TD,
            out_TD,
            self._addresses_N,
            self._num_calls_P,
            num_rows,
            eps,
            self.max_rows,
            self._rank,
            SIZE=self._size,
            NUM_PROGRAMS=NUM_PROGRAMS,
            WIDTH=self.width,
            BLOCK=block,
            num_warps=num_warps(block),
        )


@triton.jit
def _tree_sum(addresses_ptr, offset, is_in, element: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum of the parts of `COUNT` ranks, starting at rank `FIRST`, at byte `offset` of each rank's
    memory."""
    if COUNT == 1:
        part_ptr = (tl.load(addresses_ptr + FIRST) + offset).to(tl.pointer_type(element))
        # Bypass the L1 cache, which does not see the stores of other GPUs.
        total = tl.load(part_ptr, mask=is_in, other=0.0, cache_modifier=".cg").to(tl.float32)
    else:
        HALF: tl.constexpr = COUNT // 2
        first = _tree_sum(addresses_ptr, offset, is_in, element, FIRST, HALF)
        total = first + _tree_sum(addresses_ptr, offset, is_in, element, FIRST + HALF, COUNT - HALF)
    return total


@triton.jit
def _barrier(addresses_ptr, num_calls_ptr, rank, SIZE: tl.constexpr, NUM_PROGRAMS: tl.constexpr):
    """Wait until the same program of every rank has called this function as often as this one.

    Everything that they stored before can be read afterwards. Flags count calls, because a fast rank may signal its
    next call before a slow one has read the previous signal.
    """
    program = tl.program_id(0)
    num_calls = tl.load(num_calls_ptr + program) + 1
    tl.debug_barrier()  # all threads have stored their columns, and read the count
    tl.store(num_calls_ptr + program, num_calls)
    for other in tl.static_range(SIZE):
        flags_ptr = tl.load(addresses_ptr + other).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags_ptr + rank * NUM_PROGRAMS + program, num_calls, sem="release", scope="sys")
    own_ptr = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))
    for other in tl.static_range(SIZE):
        flag_ptr = own_ptr + other * NUM_PROGRAMS + program
        while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < num_calls:
            pass
    tl.debug_barrier()  # no thread reads before the waiting thread has seen all signals


@triton.jit(do_not_specialize=["num_rows", "max_rows", "rank"])
def _all_reduce_kernel(
    partial_ptr,
    bias_ptr,
    x_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    addresses_ptr,
    num_calls_ptr,
    num_rows,
    eps,
    max_rows,
    rank,
    SIZE: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p sums every n-th row, from row p on, after it has stored its own parts of these rows.

    With `x`, also store `x` plus the sum in `total`, and the norm of that in `out`; otherwise store the sum in `out`.
    """
    # Every call computes a row in the same program, so the call count of a program decides which of the two slots its
    # rows use. Before a program stores in a slot again, it has waited for all ranks once more, and each of them had
    # finished reading the slot by then, because kernels of a stream do not overlap.
    element: tl.constexpr = partial_ptr.dtype.element_ty
    out_element: tl.constexpr = out_ptr.dtype.element_ty
    ELEMENT_BYTES: tl.constexpr = element.primitive_bitwidth // 8
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_in = columns < WIDTH
    slot = tl.load(num_calls_ptr + program) % 2
    first = SIZE * NUM_PROGRAMS * 8 + slot * max_rows * WIDTH * ELEMENT_BYTES
    own = tl.load(addresses_ptr + rank)
    for row in range(program, num_rows, NUM_PROGRAMS):
        own_ptr = (own + first + (row * WIDTH + columns) * ELEMENT_BYTES).to(tl.pointer_type(element))
        tl.store(own_ptr, tl.load(partial_ptr + row * WIDTH + columns, mask=is_in), mask=is_in)
    _barrier(addresses_ptr, num_calls_ptr, rank, SIZE, NUM_PROGRAMS)
    for row in range(program, num_rows, NUM_PROGRAMS):
        offset = first + (row * WIDTH + columns) * ELEMENT_BYTES
        sum32 = _tree_sum(addresses_ptr, offset, is_in, element, 0, SIZE)
        if bias_ptr is not None:
            sum32 += tl.load(bias_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
        out = sum32.to(out_element)
        if x_ptr is not None:
            x = tl.load(x_ptr + row * WIDTH + columns, mask=is_in, other=0.0).to(tl.float32)
            total = (x + out.to(tl.float32)).to(out_element)
            tl.store(total_ptr + row * WIDTH + columns, total, mask=is_in)
            weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0)
            out = normalized(total, weight, eps, WIDTH)
        tl.store(out_ptr + row * WIDTH + columns, out, mask=is_in)
