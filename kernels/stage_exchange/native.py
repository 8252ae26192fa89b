"""`send_rows` and `receive_rows` in C++: their arguments, mirrored from `native.h`, and their recording."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.value import Buffer, Node, Recorder, Value, as_tensor, ids_of, value_of
from octavo.kernels.stage_exchange.link import SharedMemoryLink


class SendRowsArguments(Arguments):
    """See `StageExchangeArgs`."""

    _fields_ = (("hidden", Matrix), ("update", Matrix), ("link", ctypes.c_void_p))


class ReceiveRowsArguments(Arguments):
    """See `StageExchangeArgs`."""

    _fields_ = (("hidden", Matrix), ("update", Matrix), ("link", ctypes.c_void_p))


def _max_rows(link: SharedMemoryLink, width: int) -> int:
    return link.area_bytes // (width * torch.float32.itemsize)


def send(rows_TD: Tensor, link: SharedMemoryLink, library: NativeLibrary) -> None:
    """Send rows of float32 outside of a program. Blocks until: there is room for them."""
    arguments = SendRowsArguments(Matrix.of(rows_TD), Matrix(), link.address)
    run(library, "send_rows", arguments, num_rows=len(rows_TD))


def receive(rows_TD: Tensor, link: SharedMemoryLink, library: NativeLibrary) -> None:
    """Fill rows of float32 with those that `send` has sent. Blocks until: they are there."""
    arguments = ReceiveRowsArguments(Matrix.of(rows_TD), Matrix(), link.address)
    run(library, "receive_rows", arguments, num_rows=len(rows_TD))


def record_send(parts: Sequence[Tensor], width: int, link: SharedMemoryLink) -> None:
    """Record that one or two matrices of `width` columns go to the next stage."""
    values = [value_of(part_TD) for part_TD in parts]
    require(1 <= len(values) <= 2, f"send_rows: {len(values)} matrices")
    widths = [value.width for value in values]
    require(set(widths) == {width}, f"send_rows: {widths} columns, and the next stage expects {width}")

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return SendRowsArguments(inputs[0], inputs[1] if len(inputs) > 1 else Matrix(), link.address)

    max_rows = _max_rows(link, sum(value.width for value in values))
    values[0].recorder.append_effect(
        Node("send_rows", values, [], bind, is_row_wise=True, keep_alive=[link], max_rows=max_rows)
    )


def record_receive(positions_T: Tensor, num_parts: int, width: int, link: SharedMemoryLink) -> list[Tensor]:
    """Record that one or two matrices of `width` columns come from the previous stage.

    Args:
        positions_T: positions of the step that the rows belong to.
    """
    require(1 <= num_parts <= 2, f"receive_rows: {num_parts} matrices")
    recorder: Recorder = ids_of(positions_T).recorder
    buffers = [Buffer(width) for _ in range(num_parts)]

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return ReceiveRowsArguments(outputs[0], outputs[1] if num_parts > 1 else Matrix(), link.address)

    max_rows = _max_rows(link, num_parts * width)
    recorder.append_effect(
        Node("receive_rows", [], buffers, bind, is_row_wise=True, keep_alive=[link], max_rows=max_rows)
    )
    return [as_tensor(Value(recorder, buffer, 0, (width,))) for buffer in buffers]
