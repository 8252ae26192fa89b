"""Loads a model and prints the anonymous memory that it took, in bytes: at most, and at the end. Run as a program.

Arguments: the directory of the model, the quantization, and "streamed", or "copied": all tensors are copied before one
is packed; or "updated": the weights are exchanged afterwards, and the memory is that above the loaded model; or
"received": the same, and the new tensors are no views of a file, but come one by one, as from a trainer.
"""

import json
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from octavo.frontend.model_files import read_model_facts
from octavo.kernels.linear import Packer
from octavo.kernels.native import library
from octavo.protocol.config import resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.worker_commands import LoadWeights
from octavo.worker_proc import live_model
from octavo.worker_proc.device.cpu import freed_memory_returns, give_back_freed_memory
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.reader import read_weights
from octavo.worker_proc.weights.transfer import WeightReceiver
from octavo.worker_proc.weights.update_source import Checkpoint, Wants, Weights


def anonymous_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


class Peak:
    """Peak anonymous memory while it runs, by sampling."""

    def __init__(self) -> None:
        self.bytes = anonymous_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.note()

    def note(self) -> None:
        self.bytes = max(self.bytes, anonymous_bytes())

    def _sample(self) -> None:
        while not self._stopped.wait(0.0005):
            self.note()


@dataclass(frozen=True)
class Received(Checkpoint):
    """Tensors in memory of their own."""

    def read(self, wants: Wants) -> Weights:
        for name, values in super().read(wants):
            assert isinstance(values, torch.Tensor)
            yield name, values.clone()


def measure_update(model: Model, directory: str, quantization: str, source: type[Checkpoint]) -> tuple[int, Peak]:
    """Exchange the weights for the same ones; return the memory before, and the peak."""
    live_model.Checkpoint = source
    given = engine_config(
        {"model": directory, "skip_tokenizer_init": True, "dtype": "bfloat16", "quantization": quantization}
    )
    config = resolve(given, read_model_facts(given.model, Env.read()), device="cpu", num_cores=1)
    model.library = library.load()
    receiver = WeightReceiver(0, torch.device("cpu"))
    live, num_bytes = live_model.LiveModel(config, model, lambda adopted: None, receiver), model.weights_bytes
    del model
    give_back_freed_memory()
    before = anonymous_bytes()
    with Peak() as peak:
        fault, _ = live.load(LoadWeights(0, directory), in_place=False)
    assert not fault, fault
    assert live.model.weights_bytes == num_bytes
    return before, peak


def main(directory: str, quantization: str, when: str) -> None:
    torch.set_num_threads(1)
    facts = read_model_facts(engine_config({"model": directory, "skip_tokenizer_init": True}).model, Env.read())
    packer = Packer(torch.device("cpu"), library.load(), None if quantization == "none" else quantization)
    before = anonymous_bytes()
    with torch.inference_mode(), freed_memory_returns(), Peak() as peak:
        model = build_model(replace(facts, tokenizer_path=None), Placement(torch.bfloat16))
        weights = read_weights(facts, lambda fraction: peak.note(), model.parameters.wants)
        if when == "copied":
            weights = [(name, values.clone()) for name, values in weights]
        model.load_weights(weights, packer)
        model.pack(packer)
    weights_bytes = model.weights_bytes
    if when in ("updated", "received"):
        before, peak = measure_update(model, directory, quantization, Checkpoint if when == "updated" else Received)
    print(json.dumps({"peak": peak.bytes - before, "weights": weights_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
