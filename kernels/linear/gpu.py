"""`linear` on a GPU: through cuBLAS with tested row counts, or through our own kernels (`gpu_product`).

cuBLAS chooses the order of its sums by the number of rows. Without a workspace (see `octavo.worker_proc.device.cuda`)
it cannot store partial sums, and most row counts may give a row the same bits. This is tested for each weight shape
when the first weight of that shape is packed. Row counts that give other bits are padded to the next one that agrees.
If that would pad too much, our own kernels multiply.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.linear.gpu_product import InvariantLinear, TpInvariantLinear, gpu_of
from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

_MAX_RESULTS = 1 << 28
"""Maximum results of a tested product: half a gigabyte, twice."""
_MIN_COMPARED = 1 << 20
"""Results to compare for each row count, if there are enough rows. Two orders of summation round about one result in
several thousand to different 16 bits, so the outputs of a single row would often not show a difference."""
_REFERENCE_ROWS = (8192, 512)
"""Row counts whose bits are the reference: a prefill in one chunk, or in chunks of the largest usual CUDA graph."""
ALIGNMENT = 16
"""Alignment of weights in bytes: what a kernel loads at once. Weights that are multiplied together are all aligned to
it."""
USUAL_RANKS = 2
"""Number of ranks for which the splits of a tp-invariant weight are fastest. More ranks would need more, fewer
fewer."""
_FREE_ROWS = 64
"""Padding up to this many rows is free: the product takes as long as reading the weight."""
_MAX_PADDING = 1.25
"""Maximum padded rows per row above `_FREE_ROWS`; our own kernels lose about as much."""


def new_packer(*, is_batch_invariant: bool, is_tp_invariant: bool = False) -> "Packer":
    """Return a packer for a GPU."""
    return Packer(is_batch_invariant, is_tp_invariant)


class Packer:
    """Packs the weights of one model. The layout of weights that are not quantized does not change.

    Args:
        is_batch_invariant: whether rows must have the same bits in any batch.
        is_tp_invariant: whether they must also have the same bits on any number of ranks. cuBLAS would choose another
            order of sums for the part of each rank.
    """

    def __init__(self, is_batch_invariant: bool, is_tp_invariant: bool = False) -> None:
        self._is_batch_invariant = is_batch_invariant
        self._is_tp_invariant = is_tp_invariant
        self._row_counts: dict[tuple[int, int, torch.dtype, bool], tuple[int, ...] | None] = {}

    def pack(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, is_grouped: bool = False, whole_outputs: int | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the product with a weight, which must not be modified afterwards; see `DevicePacker.pack`."""
        weight_OI = weight_OI.contiguous()
        if is_grouped:
            return LibraryLinear(_aligned(weight_OI), None if bias_O is None else _aligned(bias_O))
        if self._is_tp_invariant:
            usual_outputs = -(-(whole_outputs or weight_OI.shape[0]) // USUAL_RANKS)
            return TpInvariantLinear.new(weight_OI, bias_O, gpu_of(weight_OI.device), usual_outputs)
        library = LibraryLinear(weight_OI, bias_O)
        if not self._is_batch_invariant:
            return library
        # Otherwise torch would multiply with an implementation that is not tested.
        counts = self._library_row_counts(library) if weight_OI.device.type == "cuda" else None
        if counts is not None:
            return PaddedLinear(library, counts)
        return InvariantLinear.new(weight_OI, bias_O, gpu_of(weight_OI.device))

    def pack_quantized(
        self, weight: QuantizedWeight, bias_O: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> QuantizedProduct | None:
        """See `DevicePacker.pack_quantized`. Quantized weights have no segments."""
        if self._is_tp_invariant:
            return None
        return QuantizedProduct.new(weight, bias_O, dtype, device, gpu_of(device))

    def _library_row_counts(self, library: "LibraryLinear") -> tuple[int, ...] | None:
        """Return the row counts with which cuBLAS is called for weights of this shape; `None` if it is not used."""
        num_outputs, num_inputs = library.weight_OI.shape
        key = (num_outputs, num_inputs, library.weight_OI.dtype, library.bias_O is not None)
        if key not in self._row_counts:
            weight_OI, tested = library.weight_OI, row_counts(num_outputs)
            counts = usable_row_counts(library, num_inputs, tested, weight_OI.dtype, weight_OI.device)
            self._row_counts[key] = counts
            shape = f"products of {num_inputs} inputs and {num_outputs} outputs"
            if counts is None:
                logger.info("%s: our own kernels, because the row counts of cuBLAS disagree", shape)
            else:
                padded = ", ".join(str(count) for count in tested if count not in counts)
                logger.info("%s: cuBLAS with %d row counts; padded: %s", shape, len(counts), padded or "none")
        return self._row_counts[key]


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or an aligned copy: parts of a file can lie at any address, for which kernels are not
    compiled."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LibraryLinear:
    """A weight that cuBLAS multiplies, or that `experts` and `head_linear` multiply together with others."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        return torch.nn.functional.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedLinear:
    """A product that is called only with row counts that were tested to give the same bits."""

    product: Callable[[Tensor], Tensor]
    counts: tuple[int, ...]
    """Tested row counts, ascending."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        num_rows, most = x_TI.shape[0], self.counts[-1]
        if num_rows > most:
            return torch.cat([self(part_TI) for part_TI in x_TI.split(most)])
        count = self.padded_rows(num_rows)
        if count == num_rows:
            return self.product(x_TI.contiguous())  # as when it was tested
        padded_TI = x_TI.new_empty(count, x_TI.shape[1])  # the padding rows may hold anything
        padded_TI[:num_rows] = x_TI
        return self.product(padded_TI)[:num_rows]

    def padded_rows(self, num_rows: int) -> int:
        """Return the next tested count. More rows than the largest count are computed in several products."""
        return self.counts[bisect_left(self.counts, num_rows)] if num_rows <= self.counts[-1] else num_rows


def row_counts(num_outputs: int) -> tuple[int, ...]:
    """Return the row counts that are tested, ascending.

    All sizes of graphs are among them (1, 2, 4, 8, every 8 up to 256, every 16 up to 512).
    """
    counts = (*range(1, 9), *range(16, 257, 8), *range(272, 513, 16), *range(576, 2049, 64), *range(2304, 8193, 256))
    return tuple(count for count in counts if count == 1 or count * num_outputs <= _MAX_RESULTS)


def usable_row_counts(
    product: Callable[[Tensor], Tensor],
    num_inputs: int,
    tested: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, ...] | None:
    """Return row counts with equal bits to which all tested ones can be padded at little cost; `None` if there are
    none."""
    for reference in dict.fromkeys(min(rows, tested[-1]) for rows in _REFERENCE_ROWS):
        agreeing = agreeing_row_counts(product, num_inputs, tested, reference, dtype, device)
        if is_little_padding(tested, agreeing):
            return agreeing
    return None


def agreeing_row_counts(
    product: Callable[[Tensor], Tensor],
    num_inputs: int,
    tested: Sequence[int],
    reference: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, ...]:
    """Return the tested row counts for which random rows have the same bits as in a product of `reference` rows.

    Synchronizes with the device once.
    """
    generator = torch.Generator(device).manual_seed(0)
    x_TI = torch.randn(tested[-1] // reference * reference, num_inputs, generator=generator, device=device).to(dtype)
    expected_TO = torch.cat([product(part_TI.clone()) for part_TI in x_TI.split(reference)])
    num_rows, num_outputs = expected_TO.shape
    equal = []
    for count in tested:
        num_trials = min(num_rows // count, -(-_MIN_COMPARED // (count * num_outputs)))
        # From the end, so that every row is once among the last rows, where tiles are padded.
        ends = range(num_rows, num_rows - num_trials * count, -count)
        trials = [(product(x_TI[end - count : end].clone()) == expected_TO[end - count : end]).all() for end in ends]
        equal.append(torch.stack(trials).all() if trials else torch.tensor(False, device=device))
    is_equal: list[bool] = torch.stack(equal).tolist()
    return tuple(count for count, is_agreeing in zip(tested, is_equal, strict=True) if is_agreeing)


def is_little_padding(tested: Sequence[int], agreeing: Sequence[int]) -> bool:
    """Return whether all tested row counts can be padded to agreeing ones, or cut into them, at little cost."""
    if not agreeing or agreeing[-1] < min(_REFERENCE_ROWS[-1], tested[-1]):
        return False
    within = [count for count in tested if count <= agreeing[-1]]
    padded = [agreeing[bisect_left(agreeing, count)] for count in within]
    return all(result <= max(_FREE_ROWS, _MAX_PADDING * count) for count, result in zip(within, padded, strict=True))
