"""Fakes of a GPU for the interpreter, besides its stream: devices, slow operations, a worker."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq
from fake_stream import FakeStream
from subscribers import wait_for_subscribers
from waiting import join

from octavo.kernels.linear.gpu import Packer
from octavo.kernels.rms_norm.cpu import rms_norm
from octavo.kernels.rope.cpu import rope
from octavo.kernels.store_kv import gpu as store_kv
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import WorkerSpec
from octavo.protocol.worker_commands import StopWorker
from octavo.worker_proc.device.cpu import CpuDevice
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.worker import Worker


class RowByRow:
    """The library's product in the interpreter: every row is computed separately."""

    def pack(
        self,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        *,
        is_grouped: bool = False,
        whole_outputs: int | None = None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        if is_grouped:
            return Packer(is_batch_invariant=True).pack(weight_OI, bias_O, is_grouped=True)

        def product(x_TI: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.nn.functional.linear(row, weight_OI, bias_O) for row in x_TI.split(1)])

        return product

    def pack_quantized(self, *arguments: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return Packer(is_batch_invariant=True).pack_quantized(*arguments)


def one_by_one(q_TNH, k_TKH, v_TKH, rotation, *cache) -> torch.Tensor:
    """Rotations through torch in the interpreter, where a function that a kernel calls takes half a second."""
    if (norm := rotation.norm) is not None:
        q_TNH, k_TKH = rms_norm(q_TNH, norm.q_weight_H, norm.eps), rms_norm(k_TKH, norm.k_weight_H, norm.eps)
    store_kv.store_kv(rope(k_TKH, rotation.cos_TC, rotation.sin_TC), v_TKH, *cache)
    return rope(q_TNH, rotation.cos_TC, rotation.sin_TC)


class MeasuredDevice(CpuDevice):
    """A device whose memory rises by a million bytes and falls, and then by 100, 20, 5, 4, 1, 3 and 2 that stay."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(1)
        self._fake_stream = stream
        self._free = iter((1000, 900, 900, 880, 880, 875, 875, 871, 871, 870, 870, 867, 867, 865))

    def stream(self) -> Stream:
        return self._fake_stream

    def reset_peak(self) -> None:
        pass

    def peak_growth_bytes(self) -> int:
        return 10**6

    def free_bytes(self) -> int:
        return next(self._free)


class FakeDevice(CpuDevice):
    """A device that computes asynchronously."""

    def __init__(self) -> None:
        super().__init__(1)
        self._fake_stream = FakeStream(waits_for_main=False)

    def stream(self) -> Stream:
        return self._fake_stream


class NoSignals:
    """A process that is never told to stop."""

    count = 0

    def __init__(self) -> None:
        self._fds = os.pipe()

    def fileno(self) -> int:
        return self._fds[0]

    def acknowledge(self) -> None:
        pass


def converse(
    model: Model, config: ResolvedConfig, directory: Path, talk: Callable[[Publisher, ResultPull], None]
) -> None:
    """Run a worker on a fake device in this thread, while a core in another thread sends it commands."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    commands, replies = (
        Publisher(context, f"ipc://{directory}/plans"),
        ResultPull(context, f"ipc://{directory}/results"),
    )
    addresses = {"plan_address": commands.address, "result_address": replies.address}
    worker = Worker(WorkerSpec(config=config, rank=0, world_size=1, **addresses), model, FakeDevice())

    def core() -> None:
        wait_for_subscribers(commands, 1, 10.0)
        try:
            talk(commands, replies)
        finally:  # the worker must not hang if a message is missing
            commands.send(StopWorker(commands.next_sequence))

    thread = threading.Thread(target=core)
    thread.start()
    try:
        assert worker.run(NoSignals()) == 0  # type: ignore[arg-type]
    finally:
        join(thread)
        commands.close()
        replies.close()
        context.term()
