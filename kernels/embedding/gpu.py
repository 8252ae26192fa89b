"""`embedding` on a GPU: lookups in several tables are one launch. A part of a table is read through torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.embedding import cpu

_BLOCK = 1024


def embedding(ids_T: Tensor, table_VD: Tensor, first_id: int | None = None) -> Tensor:
    """See `octavo.kernels.embedding.embedding`."""
    if first_id is not None:
        return cpu.embedding(ids_T, table_VD, first_id)
    return embeddings((ids_T, table_VD))[0]


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
    """Program (t, c) looks up block c of the columns of token t in every table. Negative ids give NaN."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for index in tl.static_range(NUM_TABLES):
        is_in = columns < widths[index]
        number = tl.load(ids[index] + row)
        places = tables[index] + number * row_strides[index] + columns * column_strides[index]
        values = tl.load(places, mask=is_in & (number >= 0), other=float("nan"))
        tl.store(outs[index] + row * widths[index] + columns, values, mask=is_in)
