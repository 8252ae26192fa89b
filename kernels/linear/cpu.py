"""`linear` on the CPU through torch, in row tiles whose sizes were tested to give the same bits.

The libraries behind torch choose their blocking, and so the order of summation, by the number of rows. With a fixed
number of rows there is one order: the bits of a row depend neither on its position in the tile nor on the other rows.
The default is ROW_TILE rows. Larger tiles cost less per row. Each larger size is tested when a weight is packed, and
used only if random rows get the same bits as with ROW_TILE. A different order of summation would show in thousands of
random sums. After rounding to 16 bits only one difference in ten thousand is visible, so a million sums are compared. A
16-bit weight with few outputs would need thousands of products for that, so it keeps ROW_TILE.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight

ROW_TILE = 16
LARGER_TILES = (32, 64, 128, 256)
TRIED_16_BIT_SUMS = 1 << 20
"""Minimum number of 16-bit results that a larger tile must reproduce."""
MIN_TRIED_OUTPUTS = 64
"""Minimum outputs of a 16-bit weight for which larger tiles are tested: with a single output the test would take
seconds."""

LINE_BYTES = 64
"""Bytes of a cache line."""

Product = Callable[[Tensor], Tensor]
"""Maps TI to TO; the number of rows is one of the tile sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinear:
    """A packed weight with its bias, and the tile sizes that give the same bits, largest first."""

    product: Product
    tiles: tuple[int, ...]

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        num_rows = x_TI.shape[0]
        outputs = []
        start = 0
        while start < num_rows:
            tile = next((tile for tile in self.tiles if tile <= num_rows - start), ROW_TILE)
            outputs.append(self.product(_rows(x_TI, start, tile)))
            start += tile
        if not outputs:
            return self.product(_rows(x_TI, 0, ROW_TILE))[:0]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[:num_rows]


class Packer:
    """Packs the weights of one model."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, int, torch.dtype, bool], tuple[int, ...]] = {}

    def pack(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, is_grouped: bool = False, whole_outputs: int | None = None
    ) -> CpuLinear:
        """Return the packed weight."""
        multiply_with = onednn_product if has_onednn(weight_OI.dtype) else plain_product
        product = multiply_with(weight_OI, bias_O)
        key = (*weight_OI.shape, weight_OI.dtype, bias_O is not None)
        if key not in self._tiles:
            self._tiles[key] = agreeing_tiles(product, weight_OI)
        return CpuLinear(product, self._tiles[key])

    def pack_quantized(
        self, weight: QuantizedWeight, bias_O: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Return `None`: torch multiplies with none of these formats."""


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def onednn_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """Keep the weight in oneDNN's blocked layout, which every product would otherwise create."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), ROW_TILE)
    bias_O = None if bias_O is None else bias_O.clone()

    def product(x_TI: Tensor) -> Tensor:
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
        return out_TO

    return product


def plain_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """Multiply with MKL, on processors or builds of torch without oneDNN.

    MKL's order of summation depends on a row's offset within a cache line, so all rows are aligned to cache lines.
    """
    padding = -weight_OI.shape[1] % (LINE_BYTES // weight_OI.element_size())
    padded_OI = torch.nn.functional.pad(weight_OI, (0, padding))
    bias_O = None if bias_O is None else bias_O.clone()

    def product(x_TI: Tensor) -> Tensor:
        if padding or x_TI.data_ptr() % LINE_BYTES:
            x_TI = torch.nn.functional.pad(x_TI, (0, padding))
        return torch.nn.functional.linear(x_TI, padded_OI, bias_O)

    return product


def _rows(x_TI: Tensor, start: int, tile: int) -> Tensor:
    """Return a tile of contiguous rows, padded with zero rows at the end of `x`.

    All tiles must have the same stride, because the library may choose its code path by it.
    """
    rows_LI = x_TI[start : start + tile]
    if rows_LI.shape[0] == tile:
        return rows_LI.contiguous()
    padded_LI = x_TI.new_zeros(tile, x_TI.shape[1])
    padded_LI[: rows_LI.shape[0]] = rows_LI
    return padded_LI


def agreeing_tiles(product: Product, weight_OI: Tensor) -> tuple[int, ...]:
    """Return the tile sizes that give random rows the same bits, largest first."""
    num_rows, (num_outputs, num_inputs) = max(LARGER_TILES), weight_OI.shape
    is_16_bit = weight_OI.dtype.itemsize == 2
    if is_16_bit and num_outputs < MIN_TRIED_OUTPUTS:
        return (ROW_TILE,)
    noise = torch.Generator().manual_seed(0)
    num_sums = TRIED_16_BIT_SUMS if is_16_bit else 1
    agreeing = list(LARGER_TILES)
    for _ in range(-(-num_sums // (num_rows * num_outputs))):
        x_TI = torch.randn(num_rows, num_inputs, generator=noise).to(weight_OI.dtype)
        expected_TO = _in_tiles(product, x_TI, ROW_TILE)
        agreeing = [tile for tile in agreeing if torch.equal(_in_tiles(product, x_TI, tile), expected_TO)]
    return (*reversed(agreeing), ROW_TILE)


def _in_tiles(product: Product, x_TI: Tensor, tile: int) -> Tensor:
    return torch.cat([product(rows_LI) for rows_LI in x_TI.split(tile)])
