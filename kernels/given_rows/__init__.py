"""Rows of a step that the caller provides, in place of those that the model looks up: prompt embeddings."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.given_rows import cpu, native

GIVEN = -3
"""Token id of a row that the caller provides."""

_IMPLEMENTATIONS = {
    "cpu": cpu.take_given_rows,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.given_rows.gpu", cpu.take_given_rows),
}
_ALL_IMPLEMENTATIONS = {"cpu": cpu.all_given_rows, "recorded": native.record_all, "cuda": cpu.all_given_rows}


def take_given_rows(x_TD: Tensor, token_ids_T: Tensor, given_XD: Tensor) -> Tensor:
    """Return `given[t]` for each row t whose token id is `GIVEN`, and `x[t]` for all others, in the dtype of `x`.

    Args:
        x_TD: rows returned for other token ids; any values, including NaN, where the caller provides the row.
        token_ids_T: int64.
        given_XD: at least as many rows as `x`; only rows whose token id is `GIVEN` are read.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        x_TD.shape[0] == token_ids_T.shape[0] and x_TD.shape[1:] == given_XD.shape[1:],
        f"take_given_rows: rows {tuple(x_TD.shape)}, {tuple(token_ids_T.shape)} ids, given {tuple(given_XD.shape)}",
    )
    return choose("take_given_rows", _IMPLEMENTATIONS, x_TD.device)(x_TD, token_ids_T, given_XD, GIVEN)


def all_given_rows(rows_T: Tensor, given_XD: Tensor) -> Tensor:
    """Return `given[t]` for each row t of a step, whatever its token.

    Args:
        rows_T: token ids or rows of the step; only their number matters.
        given_XD: at least as many rows; float32 in native programs.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    return choose("all_given_rows", _ALL_IMPLEMENTATIONS, rows_T.device)(rows_T, given_XD)
