"""`embedding` on a GPU through torch, a copy of rows; look-ups in several tables are one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.embedding.cpu import embedding as embedding

_BLOCK = 1024


def embeddings(*lookups: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """See `octavo.kernels.embedding.embeddings`."""
    ids, tables = zip(*lookups, strict=True)
    num_rows = len(ids[0])
    outs = tuple(torch.empty(num_rows, table.shape[1], dtype=table.dtype, device=table.device) for table in tables)
    if num_rows:
        widths = tuple(table.shape[1] for table in tables)
        _embeddings_kernel[num_rows, triton.cdiv(max(widths), _BLOCK)](
            ids,
            tables,
            outs,
            widths,
            tuple(table.stride(0) for table in tables),
            tuple(table.stride(1) for table in tables),
            NUM_TABLES=len(tables),
            BLOCK=_BLOCK,
        )
    return outs


@triton.jit
def _embeddings_kernel(
    ids, tables, outs, widths, row_strides, column_strides, NUM_TABLES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for index in tl.static_range(NUM_TABLES):
        is_in = columns < widths[index]
        place = tl.load(ids[index] + row) * row_strides[index]
        values = tl.load(tables[index] + place + columns * column_strides[index], mask=is_in)
        tl.store(outs[index] + row * widths[index] + columns, values, mask=is_in)
