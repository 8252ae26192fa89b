"""A trainer's process: broadcasts the tensors of a file to engines, or dies, falls silent or holds steps.

Usage: trainer.py ADDRESSES FILE whole|shape|dies|silent|holds TIMEOUT_S
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from octavo import AsyncClient
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.weights import HoldSteps
from octavo.worker_proc.training import WeightSender

NUM_SENT = 5


class Stopping(dict[str, torch.Tensor]):
    """Weights that are sent only in part."""

    is_silent = False

    def values(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        """Yield some tensors, then end the process, or wait to be killed."""
        yield from list(super().values())[:NUM_SENT]
        if self.is_silent:
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)


async def train(address: str, path: str, mode: str, timeout_s: float) -> None:
    weights = load_file(path)
    if mode == "shape":
        weights["model.norm.weight"] = torch.ones(2)
    if mode in ("dies", "silent"):
        weights = Stopping(weights)
        weights.is_silent = mode == "silent"
    async with AsyncClient.connect(address) as client:
        if mode == "holds":
            for engine in client.engines:
                await engine.link.call(HoldSteps(), timeout_s)
            print("held", flush=True)
            await asyncio.Event().wait()
        sender = await WeightSender.open(client, timeout_s=timeout_s)
        try:
            print("version", await sender.update(weights, label=mode))
            print("version", await sender.update({"model.norm.weight": weights["model.norm.weight"]}, is_partial=True))
        except InvalidRequestError as error:
            print("refused:", error)
        sender.close()


if __name__ == "__main__":
    asyncio.run(train(*sys.argv[1:4], float(sys.argv[4])))
