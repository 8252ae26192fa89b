"""What stands for a GPU in the interpreter beside its stream: devices, a process's signals, and slow operations."""

import os
from collections.abc import Callable

import torch
from fake_stream import FakeStream

from octavo.kernels.rope.cpu import rope
from octavo.kernels.store_kv import gpu as store_kv
from octavo.worker_proc.device.cpu import CpuDevice
from octavo.worker_proc.device.stream import Stream


class RowByRow:
    """In the interpreter a product of the library, whose rows do not know of each other."""

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x_TI: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.nn.functional.linear(row, weight_OI, bias_O) for row in x_TI.split(1)])

        return product


def one_by_one(q_TNH, k_TKH, v_TKH, rotation, *cache) -> torch.Tensor:
    """In the interpreter rotations of torch: a function that a kernel calls takes half a second there."""
    store_kv.store_kv(rope(k_TKH, rotation.cos_TC, rotation.sin_TC), v_TKH, *cache)
    return rope(q_TNH, rotation.cos_TC, rotation.sin_TC)


class MeasuredDevice(CpuDevice):
    """A device whose memory rises by a million bytes and falls again, and then rises by 100 and by 10 that stay."""

    def __init__(self) -> None:
        super().__init__(1)
        self._free = iter((1000, 900, 900, 890))

    def reset_peak(self) -> None:
        pass

    def peak_growth_bytes(self) -> int:
        return 10**6

    def free_bytes(self) -> int:
        return next(self._free)


class FakeDevice(CpuDevice):
    """A device that computes on its own."""

    def __init__(self) -> None:
        super().__init__(1)
        self._fake_stream = FakeStream(waits_for_main=False)

    def stream(self) -> Stream:
        return self._fake_stream


class NoSignals:
    """A process that nobody tells to end."""

    count = 0

    def __init__(self) -> None:
        self._fds = os.pipe()

    def fileno(self) -> int:
        return self._fds[0]

    def acknowledge(self) -> None:
        pass
