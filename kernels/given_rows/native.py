"""`take_given_rows` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, Value, as_tensor, ids_of, value_of


class GivenRowsArguments(Arguments):
    """See `GivenRowsArgs`."""

    _fields_ = (("x", Matrix), ("given", Matrix), ("out", Matrix), ("given_id", ctypes.c_int64))


def record(x_TD: Tensor, token_ids_T: Tensor, given_XD: Tensor, given_id: int) -> Tensor:
    """Record the copy of the rows that are given."""
    x, ids = value_of(x_TD), ids_of(token_ids_T)
    assert ids.source == "token_ids" and ids.offset == 0, "the ids of the step itself"

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return GivenRowsArguments(*inputs, Matrix.of(given_XD), *outputs, given_id)

    node = Node("given_rows", [x], [Buffer(x.width)], bind, is_row_wise=True, in_place=0, keep_alive=[given_XD])
    return as_tensor(x.recorder.append(node, (x.width,)))


def record_all(rows_T: Tensor, given_XD: Tensor) -> Tensor:
    """Record the copy of all rows. A row that is not given is copied from the same place."""
    recorder = (rows_T if isinstance(rows_T, Value) else ids_of(rows_T)).recorder

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return GivenRowsArguments(Matrix.of(given_XD), Matrix.of(given_XD), *outputs, 0)

    output = Buffer(given_XD.shape[1])
    node = Node("given_rows", [], [output], bind, is_row_wise=True, keep_alive=[given_XD])
    return as_tensor(recorder.append(node, (output.width,)))
