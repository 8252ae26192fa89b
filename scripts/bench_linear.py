"""Speed of `linear` by shape, kind of weight and number of rows, compared with torch and the machine's limits.

There are enough copies of each weight to exceed every cache. One call of the native library multiplies all of them, as
a step does with a model's layers. Native and torch runs take turns, and the best run counts, to exclude other load on
the machine. With one thread, processor time is measured for the same reason.

    .venv/bin/python scripts/bench_linear.py --kinds bf16 int8 --rows 1 8 32 512
"""

import argparse
import ctypes
import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.linear import cpu
from octavo.kernels.linear.codebooks import CODEBOOKS, codebook_bits
from octavo.kernels.linear.native import Epilogue, NativeLinear, arguments
from octavo.kernels.linear.packing import pack_coded, pack_plain, pack_quantized
from octavo.kernels.linear.quantization import GROUP_SIZE, quantize_weight
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.native.arguments import Matrix, OperationEntry, ProgramArguments, StepArguments
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.native.memory import allocate
from octavo.kernels.quantize.native import quantize_rows

SHAPES: dict[str, dict[str, tuple[int, int, Epilogue]]] = {
    "135m": {
        "qkv": (576, 960, "none"),
        "o": (576, 576, "none"),
        "gate_up": (576, 3072, "silu_and_mul"),
        "down": (1536, 576, "none"),
        "head": (576, 49152, "none"),
    },
    "0.5b": {
        "qkv": (896, 1152, "none"),
        "o": (896, 896, "none"),
        "gate_up": (896, 9728, "silu_and_mul"),
        "down": (4864, 896, "none"),
        "head": (896, 151936, "none"),
    },
    "siglip": {
        "qkv": (768, 2304, "none"),
        "o": (768, 768, "none"),
        "up": (768, 3072, "gelu_tanh"),
        "down": (3072, 768, "none"),
    },
}
"""Inputs, outputs and fused epilogue of the layers of SmolLM2-135M, Qwen2.5-0.5B and SigLIP's base model."""
COLD_BYTES = 160 << 20
"""Total bytes of the copies of a weight: several times the last-level cache."""
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
CODE_GROUP = 64
"""Inputs that share a scale in weights of float codes."""
CHECKPOINTS = {"gptq": (4, 128, False), "awq": (4, 128, True), "q4_0": (4, 32, False), "w8a16": (8, 128, False)}
"""Bits, inputs that share a scale, and whether groups have zero points, of common checkpoint formats."""
OTHERS = ("bf16_12", "int8", "int4", "w8a8", "e4m3", "e2m1", "nf4", *CHECKPOINTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="135m")
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument(
        "--kinds", nargs="+", default=["bf16", "bf16_12", "w8a8", "int8", "int4"], choices=[*DTYPES, *OTHERS]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="inputs that share a scale in int8 and int4")
    parser.add_argument("--level", help="instruction set, such as avx512_bf16; default: the best")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds for each cell of the table")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load(options.level)
    print(f"{library.isa}, {options.threads} threads")
    if not options.no_torch:
        print_limits()
    print(f"{'':10}{'':8}{'rows':>5}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}{'torch us':>10}{'torch/ours':>11}")
    for name, (num_inputs, num_outputs, epilogue) in SHAPES[options.model].items():
        if options.shapes and name not in options.shapes:
            continue
        for kind in options.kinds:
            weight = torch.randn(num_outputs, num_inputs) / num_inputs**0.5
            cell = Cell(library, weight, kind, epilogue, options, with_torch=not options.no_torch)
            for rows in options.rows:
                print(f"{name:10}{kind:8}{rows:>5}" + cell.measure(rows, options.seconds))


class Cell:
    """All copies of one weight, packed for both libraries."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: Tensor,
        kind: str,
        epilogue: Epilogue,
        options: argparse.Namespace,
        *,
        with_torch: bool,
    ) -> None:
        self.library, self.kind, self.epilogue = library, kind, epilogue
        self.threads, self.group_size = options.threads, options.group_size
        self.num_outputs, self.num_inputs = weight.shape
        first = self._pack(weight)
        self.num_copies = max(2, -(-COLD_BYTES // first.num_bytes))
        self.packed = [first, *(self._pack(weight) for _ in range(self.num_copies - 1))]
        self.products: list[cpu.Product] = []
        if with_torch and kind in DTYPES:
            dense = weight.to(DTYPES[kind])
            product = cpu.onednn_product if cpu.has_onednn(dense.dtype) else cpu.plain_product
            self.products = [product(dense, None) for _ in range(self.num_copies)]

    def _pack(self, weight: Tensor) -> NativeLinear:
        if self.kind in DTYPES:
            return pack_plain(self.library, weight.to(DTYPES[self.kind]))
        if self.kind == "bf16_12":
            packed = pack_coded(self.library, weight.bfloat16(), max_escapes=1.0)
            assert packed is not None
            return packed
        if self.kind in CHECKPOINTS:
            return pack_quantized(self.library, levels_of_checkpoint(weight, *CHECKPOINTS[self.kind]))
        if self.kind in CODEBOOKS:
            groups = torch.rand(len(weight), -(-weight.shape[1] // CODE_GROUP))
            codes = torch.randint(0, 2 ** codebook_bits(self.kind), weight.shape, dtype=torch.uint8).clamp_(max=126)
            coded = QuantizedWeight(codes, groups, None, 0, codebook_bits(self.kind), CODE_GROUP, codebook=self.kind)
            return pack_quantized(self.library, coded)
        return pack_quantized(self.library, quantize_weight(self.library, weight, self.kind, self.group_size))

    def measure(self, rows: int, seconds: float) -> str:
        """Return the columns of one line of the table."""
        x = torch.randn(rows, self.num_inputs)
        native, keeps = self._native(x)
        calls = [native]
        if self.products:
            narrow = x.to(DTYPES[self.kind])
            calls.append(lambda: [product(narrow) for product in self.products])
        best = [best_s / self.num_copies for best_s in best_of(calls, seconds)]
        del keeps
        gigabytes = self.packed[0].num_bytes / best[0] * 1e-9
        gigaflops = 2e-9 * rows * self.num_inputs * self.num_outputs / best[0]
        line = f"{best[0] * 1e6:>10.1f}{gigabytes:>8.1f}{gigaflops:>9.1f}"
        return line + (f"{best[1] * 1e6:>10.1f}{best[1] / best[0]:>11.2f}" if self.products else "")

    def _native(self, x: Tensor) -> tuple[Callable[[], object], list[object]]:
        """Return a call that multiplies by all copies, and the objects that must stay alive for it."""
        width = self.num_outputs // 2 if self.epilogue == "silu_and_mul" else self.num_outputs
        inputs = [x if self.packed[0].is_quantized else x.to(self.packed[0].input_form.type)]
        if self.packed[0].is_quantized:
            quantized = quantize_rows(self.library, x, self.packed[0].input_form, self.threads)
            inputs = [quantized.levels_TI, quantized.scale_TG, quantized.sum_TG]
        out = torch.empty(len(x), width)
        matrices, out_matrix = [Matrix.of(tensor) for tensor in inputs], Matrix.of(out)
        calls = [arguments(matrices, packed, out_matrix, epilogue=self.epilogue) for packed in self.packed]
        entries = (OperationEntry * len(calls))()
        function = self.library.operation("linear", type(calls[0]))
        for index, call in enumerate(calls):
            entries[index] = OperationEntry(function, ctypes.addressof(call), 1)
        counters = (ctypes.c_int64 * len(calls))()
        program = ProgramArguments(entries, len(calls), ctypes.addressof(counters), None)
        step = StepArguments(num_rows=len(x))
        run = self.library.function("run", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])
        addresses = ctypes.addressof(program), ctypes.addressof(step)
        return lambda: run(*addresses, self.threads), [inputs, out, calls, entries, counters, program, step]


def levels_of_checkpoint(weight: Tensor, bits: int, group_size: int, has_zeros: bool) -> QuantizedWeight:
    """Return a quantized weight with random levels in the shape of `weight`."""
    num_groups = -(-weight.shape[1] // group_size)
    levels = torch.randint(0, 2**bits, weight.shape, dtype=torch.uint8)
    scales = torch.rand(len(weight), num_groups).half() + 0.1
    middle = 2 ** (bits - 1)
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8) if has_zeros else None
    return QuantizedWeight(levels, scales, None, 0 if has_zeros else middle, bits, group_size, zero_OG=zeros)


def best_of(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Return the seconds of the best run of each call; they take turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or best[-1] == float("inf"):
        for index, call in enumerate(calls):
            start = clock()
            call()
            best[index] = min(best[index], clock() - start)
    return best


def print_limits() -> None:
    """Measure torch's peak read and multiply rates."""
    memory = allocate(1 << 30).view(torch.float32)
    memory.fill_(1.0)
    a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    c, d = torch.ones(2048, 2048, dtype=torch.int8), torch.ones(2048, 2048, dtype=torch.int8)
    calls: list[Callable[[], object]] = [memory.sum, lambda: a @ b, lambda: torch._int_mm(c, d)]
    reading, bf16, int8 = best_of(calls, 1.5)
    print(f"limits: {memory.nbytes / reading * 1e-9:.1f} GB/s read", end=", ")
    print(f"{2e-9 * 2048**3 / bf16:.0f} GFLOP/s bf16, {2e-9 * 2048**3 / int8:.0f} GOP/s int8")


if __name__ == "__main__":
    main()
