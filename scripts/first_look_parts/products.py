"""Products with a weight: which row counts of cuBLAS agree, and how fast cuBLAS and our kernel are."""

from typing import Any

import torch
from bench_gpu_parts.timing import IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of

from first_look_parts.figures import cell_result, figure
from octavo.kernels.linear import gpu

LEAST_S = 0.05
"""Minimum time of one measurement; there are about a hundred."""
ELEMENT_BYTES = 2


@torch.inference_mode()
def agreeing_rows(name: str, num_outputs: int, num_inputs: int) -> dict[str, Any]:
    """Return for a weight which row counts give a row the same bits in cuBLAS as the largest one does."""
    weight = normal(num_outputs, num_inputs) * num_inputs**-0.5
    library = gpu.LibraryLinear(weight, None)
    counts = gpu.row_counts(num_outputs) if IS_ON_GPU else (1, 2, 8)
    largest = counts[-1]
    differing = [
        count
        for count in counts[:-1]
        if not gpu.agree(library, num_inputs, (count, largest), weight.dtype, weight.device)
    ]
    del library, weight
    release_memory()
    share = 100 * (1 - len(differing) / len(counts))
    title = f"row counts of cuBLAS that agree with {largest}, {name}"
    lines = [f"{name}: cuBLAS differs from {largest} rows at {_ranges(differing, counts)}"] if differing else []
    found = figure(f"agree-{name}", title, "%", share, is_higher_better=True)
    return cell_result([found], {"counts": list(counts), "differing": differing}, lines)


@torch.inference_mode()
def products(name: str, num_outputs: int, num_inputs: int, rows: list[int]) -> dict[str, Any]:
    """Return the microseconds of a product for each number of rows, by cuBLAS and by our kernel."""
    copies = num_copies(num_outputs * num_inputs * ELEMENT_BYTES)
    weights = [normal(num_outputs, num_inputs) for _ in range(copies)]
    kinds = {
        "cublas": [gpu.LibraryLinear(weight, None) for weight in weights],
        "octavo": [gpu.InvariantLinear(weight, None) for weight in weights],
    }
    figures = []
    for num_rows in rows:
        x = normal(num_rows, num_inputs)
        num_bytes = ELEMENT_BYTES * (num_rows * (num_inputs + num_outputs) + num_outputs * num_inputs)
        bound = [(num_bytes, 2.0 * num_rows * num_outputs * num_inputs)]
        for column, multiply in kinds.items():
            replay = captured(lambda copy, multiply=multiply, x=x: multiply[copy](x), copies)  # type: ignore[misc]
            spent_s = seconds_of(replay, LEAST_S) / copies
            title = f"{name}, {num_rows} rows"
            key = f"product-{name}-{num_rows}"
            figures.append(figure(key, title, "us", 1e6 * spent_s, column=column, seconds=spent_s, bound=bound))
            del replay
    del kinds, weights
    release_memory()
    return cell_result(figures)


def _ranges(some: list[int], counts: tuple[int, ...]) -> str:
    """Return numbers as ranges of neighbouring counts: "1 to 8, 24"."""
    places = [counts.index(count) for count in some]
    parts = []
    start = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            first, last = some[start], some[index - 1]
            parts.append(f"{first}" if first == last else f"{first} to {last}")
            start = index
    return ", ".join(parts)
