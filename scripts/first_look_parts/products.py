"""Products with a weight: which row counts of cuBLAS agree, and the speed of cuBLAS and of our kernel."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from bench_gpu_parts.timing import IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of
from gpu_estimates import DeviceName, Epilogue, estimate_product

from first_look_parts.figures import cell_result, figure
from octavo.kernels.linear import gpu
from octavo.kernels.linear.gpu_product import InvariantLinear, gpu_of
from octavo.kernels.silu_and_mul import silu_and_mul

Product = Callable[[torch.Tensor], torch.Tensor]

LEAST_S = 0.05
"""Minimum time of one measurement in seconds; there are about a hundred."""
ELEMENT_BYTES = 2


@torch.inference_mode()
def agreeing_rows(name: str, num_outputs: int, num_inputs: int) -> dict[str, Any]:
    """Return the row counts for which cuBLAS gives a row the same bits as with the largest count, for a weight."""
    weight = normal(num_outputs, num_inputs) * num_inputs**-0.5
    library = gpu.LibraryLinear(weight, None)
    counts = gpu.row_counts(num_outputs) if IS_ON_GPU else (1, 2, 8)
    largest = counts[-1]
    agreeing = gpu.agreeing_row_counts(library, num_inputs, counts, largest, weight.dtype, weight.device)
    differing = sorted(set(counts) - set(agreeing))
    del library, weight
    release_memory()
    share = 100 * (1 - len(differing) / len(counts))
    title = f"row counts of cuBLAS that agree with {largest}, {name}"
    lines = [f"{name}: cuBLAS differs from {largest} rows at {_ranges(differing, counts)}"] if differing else []
    found = figure(f"agree-{name}", title, "%", share, is_higher_better=True)
    return cell_result([found], {"counts": list(counts), "differing": differing}, lines)


@torch.inference_mode()
def products(name: str, num_outputs: int, num_inputs: int, rows: list[int]) -> dict[str, Any]:
    """Return the microseconds of a product for each number of rows: estimated, with cuBLAS and with our kernels."""
    copies = num_copies(num_outputs * num_inputs * ELEMENT_BYTES)
    weights = [normal(num_outputs, num_inputs) for _ in range(copies)]
    library = [gpu.LibraryLinear(weight, None) for weight in weights]
    own = [InvariantLinear.new(weight, None, gpu_of(weight.device)) for weight in weights]
    kinds: dict[Epilogue, dict[str, Sequence[Product]]] = {"none": {"cublas": library, "octavo": own}}
    if name.endswith("gate_up"):  # cuBLAS needs two kernels
        gated = [lambda x, multiply=multiply: silu_and_mul(multiply(x)) for multiply in library]
        kinds["silu_and_mul"] = {"cublas": gated, "octavo": [one.silu_and_mul for one in own]}
    figures = []
    for (epilogue, columns), num_rows in product(kinds.items(), rows):
        x = normal(num_rows, num_inputs)
        results = num_outputs // 2 if epilogue == "silu_and_mul" else num_outputs
        num_bytes = ELEMENT_BYTES * (num_rows * (num_inputs + results) + num_outputs * num_inputs)
        bound = [(num_bytes, 2.0 * num_rows * num_outputs * num_inputs)]
        shown = name if epilogue == "none" else f"{name}+{epilogue}"
        key, title = f"product-{shown}-{num_rows}", f"{shown}, {num_rows} rows"
        estimate = estimate_product(num_rows, num_outputs, num_inputs, "bfloat16", device_name(), epilogue)
        figures.append(figure(key, title, "us", 1e6 * estimate.seconds, column="estimate"))
        for column, multiply in columns.items():
            replay = captured(lambda copy, multiply=multiply, x=x: multiply[copy](x), copies)  # type: ignore[misc]
            spent_s = seconds_of(replay, LEAST_S) / copies
            figures.append(figure(key, title, "us", 1e6 * spent_s, column=column, seconds=spent_s, bound=bound))
            del replay
    del kinds, library, own, weights
    release_memory()
    return cell_result(figures)


def device_name() -> DeviceName:
    """Return the GPU whose rates the estimates use: an H200 for all GPUs but an H100."""
    is_h100 = IS_ON_GPU and "H100" in torch.cuda.get_device_name()
    return "H100" if is_h100 else "H200"


def _ranges(some: list[int], counts: tuple[int, ...]) -> str:
    """Return numbers as ranges of consecutive counts: "1 to 8, 24"."""
    places = [counts.index(count) for count in some]
    parts = []
    start = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            first, last = some[start], some[index - 1]
            parts.append(f"{first}" if first == last else f"{first} to {last}")
            start = index
    return ", ".join(parts)
