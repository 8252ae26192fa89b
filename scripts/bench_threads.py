"""Effect of a busy neighbour on a decode step with one thread, with all threads, and with `ThreadPolicy`.

The step is the linear layers of SmolLM2-135M for a few rows, in one program with a barrier after each. Neighbours are
processes of this script. One never sleeps; one works for a third of the time, a millisecond at once, like the core and
the frontend of a busy server. Prints steps per second and the fraction of time that threads waited for a core.

    .venv/bin/python scripts/bench_threads.py --rows 1
"""

import argparse
import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

from octavo.kernels.linear.native import Epilogue, arguments
from octavo.kernels.linear.packing import pack
from octavo.kernels.native.arguments import Matrix, OperationEntry, ProgramArguments, StepArguments
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.native.threads import ThreadPolicy

NUM_LAYERS = 30
SHAPES: list[tuple[int, int, Epilogue]] = [
    (576, 960, "none"),
    (576, 576, "none"),
    (576, 3072, "silu_and_mul"),
    (1536, 576, "none"),
]
HEAD = (576, 49152)

NEIGHBOURS = {
    "none": "",
    "busy": "while True: pass",
    "a third": """
import time
while True:
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end: pass
    time.sleep(0.002)
""",
}


class DecodeStep:
    """The linear layers of a model over a number of rows; reads every weight once."""

    def __init__(self, library: NativeLibrary, num_rows: int) -> None:
        self._kept = []
        shapes = [*SHAPES * NUM_LAYERS, (*HEAD, "none")]
        entries = [self._entry(library, num_rows, *shape) for shape in shapes]
        self._entries = (OperationEntry * len(entries))(*entries)
        self._counters = (ctypes.c_int64 * len(entries))()
        self._program = ProgramArguments(self._entries, len(entries), ctypes.addressof(self._counters), None)
        self._step = StepArguments(num_rows=num_rows)
        self._run = library.function("run", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])
        self.work = num_rows * sum(num_inputs * num_outputs for num_inputs, num_outputs, _ in shapes)

    def _entry(
        self, library: NativeLibrary, num_rows: int, num_inputs: int, num_outputs: int, epilogue: Epilogue
    ) -> OperationEntry:
        packed = pack(library, torch.randn(num_outputs, num_inputs).bfloat16())
        x = torch.randn(num_rows, num_inputs).bfloat16()
        out = torch.empty(num_rows, num_outputs // 2 if epilogue == "silu_and_mul" else num_outputs)
        call = arguments([Matrix.of(x)], packed, Matrix.of(out), epilogue=epilogue)
        self._kept.append((packed, x, out, call))
        return OperationEntry(library.operation("linear", type(call)), ctypes.addressof(call), 1)

    def run(self, num_threads: int) -> None:
        self._run(ctypes.addressof(self._program), ctypes.addressof(self._step), num_threads)


@contextlib.contextmanager
def neighbour(name: str) -> Iterator[None]:
    """Run a busy process while the context lasts."""
    if not NEIGHBOURS[name]:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOURS[name]])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(step: DecodeStep, choose: Callable[[], int], seconds: float) -> tuple[float, float]:
    """Return steps per second and the mean number of threads."""
    num_steps = num_threads = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count = choose()
        step.run(count)
        num_steps += 1
        num_threads += count
    return num_steps / elapsed, num_threads / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each figure")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    library = load()
    step = DecodeStep(library, options.rows)
    policy = ThreadPolicy(library, options.threads)
    choices = {
        "1 thread": lambda: 1,
        f"{options.threads} threads": lambda: options.threads,
        "chosen": lambda: policy.choose(step.work),
    }
    print(f"{library.isa}, {options.rows} rows; steps per second (mean threads)")
    print(f"{'neighbour':<12}" + "".join(f"{name:>18}" for name in choices))
    for _ in range(options.rounds):
        for name in NEIGHBOURS:
            with neighbour(name):
                cells = [measure(step, choose, options.seconds) for choose in choices.values()]
            print(f"{name:<12}" + "".join(f"{rate:>11.1f} ({mean:.2f})" for rate, mean in cells), flush=True)


if __name__ == "__main__":
    main()
