"""`linear` on a GPU: through cuBLAS, or through a kernel that gives a row the same bits in any batch.

cuBLAS splits the sums of a product by the number of rows, and so changes their order. The kernel here always adds up
the inputs in blocks of one size, in order; the number of rows only decides how many rows and outputs a program
computes. Tiles have at least 64 rows, so that on Hopper every tile uses the same instruction, wgmma. For a few rows
that wastes arithmetic, which is free while the weight is being read.

Without a workspace (see `octavo.worker_proc.device.cuda`) cuBLAS cannot store partial sums, and may be batch-invariant.
That is tested for each weight shape when the first weight of that shape is packed, with a fixed set of row counts. If
all of them give the same bits, cuBLAS multiplies, and rows are padded to one of these counts.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

logger = logging.getLogger(__name__)

_MOST_TRIED = 1 << 28
"""Most results of a tested product: half a gigabyte, twice."""
_LEAST_COMPARED = 1 << 20
"""Results to compare for each row count, if there are enough rows. Two orders of summation round about one result in
some
thousands to different 16 bits; the outputs of a single row would often not show it."""
_INPUTS_BLOCK = {2: 64, 4: 32}
"""Inputs that are summed at once, by the element size in bytes. The size determines the order of summation."""
_TILES_IN_GROUP = 8
"""Row tiles that are computed one after another for the same tile of outputs, to reuse the weight in the cache."""


def new_packer(*, is_batch_invariant: bool) -> "Packer":
    """Return a packer for a GPU."""
    return Packer(is_batch_invariant)


class Packer:
    """Packs the weights of one model, without changing their layout.

    Args:
        is_batch_invariant: whether rows must have the same bits in any batch.
    """

    def __init__(self, is_batch_invariant: bool) -> None:
        self._is_batch_invariant = is_batch_invariant
        self._agreeing: dict[tuple[int, int, torch.dtype, bool], bool] = {}

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return the product with a weight, which must not be modified afterwards."""
        weight_OI = weight_OI.contiguous()
        library = LibraryLinear(weight_OI, bias_O)
        if not self._is_batch_invariant:
            return library
        # Without cuBLAS torch would multiply with something that is not tested.
        if weight_OI.device.type == "cuda" and self._is_agreeing(library):
            return PaddedLinear(library, row_counts(weight_OI.shape[0]))
        return InvariantLinear(weight_OI, bias_O)

    def _is_agreeing(self, library: "LibraryLinear") -> bool:
        weight_OI = library.weight_OI
        num_outputs, num_inputs = weight_OI.shape
        key = (num_outputs, num_inputs, weight_OI.dtype, library.bias_O is not None)
        if key not in self._agreeing:
            counts = row_counts(num_outputs)
            self._agreeing[key] = agree(library, num_inputs, counts, weight_OI.dtype, weight_OI.device)
            chosen = "cuBLAS" if self._agreeing[key] else "our kernel"
            logger.info("products of %d inputs and %d outputs: %s", num_inputs, num_outputs, chosen)
        return self._agreeing[key]


@dataclass(frozen=True, slots=True, eq=False)
class LibraryLinear:
    """A weight that cuBLAS multiplies."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        return torch.nn.functional.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedLinear:
    """A product that is only called with row counts that were tested to give the same bits."""

    product: Callable[[Tensor], Tensor]
    counts: tuple[int, ...]
    """Ascending."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        num_rows, most = x_TI.shape[0], self.counts[-1]
        if num_rows > most:
            return torch.cat([self(part_TI) for part_TI in x_TI.split(most)])
        count = self.counts[bisect_left(self.counts, num_rows)]
        if count == num_rows:
            return self.product(x_TI.contiguous())  # as when it was tested
        padded_TI = x_TI.new_zeros(count, x_TI.shape[1])
        padded_TI[:num_rows] = x_TI
        return self.product(padded_TI)[:num_rows]


def row_counts(num_outputs: int) -> tuple[int, ...]:
    """Return the row counts with which a product is tested and then called.

    All sizes of graphs are among them (1, 2, 4, 8, every 8 up to 256, every 16 up to 512).
    """
    counts = (*range(1, 9), *range(16, 257, 8), *range(272, 513, 16), *range(576, 2049, 64), *range(2304, 8193, 256))
    return tuple(count for count in counts if count == 1 or count * num_outputs <= _MOST_TRIED)


def agree(
    product: Callable[[Tensor], Tensor],
    num_inputs: int,
    counts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Return whether random rows have the same bits for all row counts.

    Synchronizes with the device once.
    """
    generator = torch.Generator(device).manual_seed(0)
    x_TI = torch.randn(max(counts), num_inputs, generator=generator, device=device).to(dtype)
    expected_TO = product(x_TI)
    num_rows, num_outputs = expected_TO.shape
    equal = []
    for count in counts:
        num_trials = min(num_rows // count, -(-_LEAST_COMPARED // (count * num_outputs)))
        # From the end, so that every row is once among the last ones, where tiles are padded.
        for end in range(num_rows, num_rows - num_trials * count, -count):
            found_TO = product(x_TI[end - count : end].clone())
            equal.append((found_TO == expected_TO[end - count : end]).all())
    return bool(torch.stack(equal).all())


@dataclass(frozen=True, slots=True, eq=False)
class InvariantLinear:
    """A weight that the kernel of this file multiplies."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        rows_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        num_rows, (num_outputs, num_inputs) = rows_TI.shape[0], self.weight_OI.shape
        out_TO = torch.empty(num_rows, num_outputs, dtype=x_TI.dtype, device=x_TI.device)
        tile = _tile(num_rows, x_TI.dtype)
        if out_TO.numel():
            grid = (triton.cdiv(num_rows, tile["ROWS_BLOCK"]) * triton.cdiv(num_outputs, tile["OUTPUTS_BLOCK"]),)
            _linear_kernel[grid](
                rows_TI,
                self.weight_OI,
                self.weight_OI if self.bias_O is None else self.bias_O,
                out_TO,
                num_rows,
                num_outputs,
                rows_TI.stride(0),
                NUM_INPUTS=num_inputs,
                HAS_BIAS=self.bias_O is not None,
                INPUTS_BLOCK=_INPUTS_BLOCK[x_TI.dtype.itemsize],
                TILES_IN_GROUP=_TILES_IN_GROUP,
                **tile,
            )
        return out_TO


def _tile(num_rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of a program and its launch options."""
    if dtype.itemsize == 4:
        return {"ROWS_BLOCK": 64, "OUTPUTS_BLOCK": 64, "num_warps": 8, "num_stages": 3}
    if num_rows <= 64:
        return {"ROWS_BLOCK": 64, "OUTPUTS_BLOCK": 32, "num_warps": 4, "num_stages": 6}
    if num_rows <= 512:
        return {"ROWS_BLOCK": 64, "OUTPUTS_BLOCK": 128, "num_warps": 4, "num_stages": 4}
    return {"ROWS_BLOCK": 128, "OUTPUTS_BLOCK": 128, "num_warps": 8, "num_stages": 4}


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    row_stride,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    TILES_IN_GROUP: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS_BLOCK)
    tiles_in_group = TILES_IN_GROUP * tl.cdiv(num_outputs, OUTPUTS_BLOCK)
    first_row_tile = tl.program_id(0) // tiles_in_group * TILES_IN_GROUP
    group_rows = tl.minimum(row_tiles - first_row_tile, TILES_IN_GROUP)
    row_tile = first_row_tile + tl.program_id(0) % tiles_in_group % group_rows
    output_tile = tl.program_id(0) % tiles_in_group // group_rows
    rows = row_tile * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)
    outputs = output_tile * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    inputs = tl.arange(0, INPUTS_BLOCK)
    # Rows and outputs beyond the end repeat the last one and are not stored.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64) * row_stride
    weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64) * NUM_INPUTS
    sums = tl.zeros((ROWS_BLOCK, OUTPUTS_BLOCK), tl.float32)
    for start in range(0, NUM_INPUTS, INPUTS_BLOCK):
        at = start + inputs
        if NUM_INPUTS % INPUTS_BLOCK == 0:
            x = tl.load(x_ptr + x_rows[:, None] + at[None, :])
            weight = tl.load(weight_ptr + weight_rows[None, :] + at[:, None])
        else:
            x = tl.load(x_ptr + x_rows[:, None] + at[None, :], mask=(at < NUM_INPUTS)[None, :], other=0.0)
            weight = tl.load(
                weight_ptr + weight_rows[None, :] + at[:, None], mask=(at < NUM_INPUTS)[:, None], other=0.0
            )
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    is_in = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    out = out_ptr + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=is_in)
