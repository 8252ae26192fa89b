"""What mixtures of experts should take on a GPU, by arithmetic. Prints the tables of docs/gpu-kernels.md.

Tokens are routed at random, evenly. The tiles are those of `kernels/experts/gpu.py`. The instructions are counted in
the machine code for Hopper; `tests/kernels/test_kernel_instructions.py` compares them. Rates of Hopper are those of
`gpu_estimates`; rates of an L4 are the vendor's or assumed, as noted.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from bench_gpu_parts.mixtures import MIXTURES, Mixture
from gpu_estimates import (
    CACHE_BYTES,
    DEVICES,
    ELEMENT_BYTES,
    FIXED_S,
    GATED_TILE_INSTRUCTIONS,
    KERNEL_S,
    LATENCY_S,
    PORT_BYTES,
    ROWS,
    SHARED_BYTES,
    TENSOR_SHARE,
    Device,
)

GpuName = Literal["H200", "L4"]
GPUS: dict[GpuName, tuple[Device, int, int]] = {
    "H200": (DEVICES["H200"], 132, 227 << 10),
    # Vendor: 300 GB/s, 121e12 flops without sparsity, 58 multiprocessors, 2.04 GHz; what is left of the flops within
    # 72 W, and the rate of the cache, are assumed.
    "L4": (Device(0.27e12, 1.5e12, 75e12, 1.7e9), 58, 99 << 10),
}
"""Rates, number of multiprocessors, and shared memory of each multiprocessor in bytes."""
INPUTS, NUM_STAGES = 64, 4
TILE_OUTPUTS = 128
"""Rows of weights in a tile; in a tile of gates and ups, half of the rows are from each."""
LOOP_INSTRUCTIONS = 86
"""Instructions of a warp for a block of 64 inputs: the most of all products."""
EMPTY_S = 0.3e-6
"""Seconds of a program without a tile, which only reads a number; eight at a time on a multiprocessor. Assumed."""
SORT_BLOCK, SORT_BLOCK_S = 4096, 1.5e-6
"""Slots per iteration of the two loops of the sorting program, and seconds of an iteration. Assumed."""
CHOICE_S = 0.25e-6
"""Seconds of one round in the choice of experts, in one warp. Assumed."""


@dataclass(frozen=True)
class LayerEstimate:
    """Estimate of the experts of a layer, without the router."""

    num_read: int
    """Number of experts whose weights are read."""
    parts_s: dict[str, float]
    """Seconds of each kernel."""
    roofline_s: float
    """Seconds for the bytes that must be moved, or for the operations, at the device's rates; the larger."""

    @property
    def seconds(self) -> float:
        """Seconds of all kernels."""
        return sum(self.parts_s.values())

    @property
    def share(self) -> float:
        """The expected fraction of the roofline."""
        return self.roofline_s / self.seconds


def estimate_layer(mixture: Mixture, num_tokens: int, gpu: GpuName) -> LayerEstimate:
    """Estimate the experts of a layer."""
    rates, _, _ = GPUS[gpu]
    counts = routed(mixture, num_tokens)
    num_slots = num_tokens * mixture.top_k
    tile_rows = 64 if num_slots <= 64 * mixture.num_experts else 128
    num_read = int((counts > 0).sum())
    around_s = around_products_s(mixture, num_tokens, rates)
    parts_s = {
        "route": around_s["route"],
        "sort": around_s["sort"],
        "gate_up": _product_s(counts, tile_rows, 2 * mixture.inner, mixture.width, mixture.inner, gpu),
        "down": _product_s(counts, tile_rows, mixture.width, mixture.inner, mixture.width, gpu),
        "combine": around_s["combine"],
    }
    least_bytes = num_read * mixture.weight_bytes() + 2 * num_tokens * mixture.width * ELEMENT_BYTES
    roofline_s = max(least_bytes / rates.memory_bytes, mixture.flops(num_tokens) / rates.matrix_flops)
    return LayerEstimate(num_read, parts_s, roofline_s)


def around_products_s(mixture: Mixture, num_tokens: int, rates: Device) -> dict[str, float]:
    """Return the times of the kernels before and after the products."""
    num_slots = num_tokens * mixture.top_k
    combined_bytes = (num_slots + num_tokens) * mixture.width * ELEMENT_BYTES
    return {
        "route": KERNEL_S + mixture.top_k * CHOICE_S,
        "sort": KERNEL_S + 2 * -(-num_slots // SORT_BLOCK) * SORT_BLOCK_S,
        "combine": KERNEL_S
        + combined_bytes / (rates.cache_bytes if combined_bytes <= CACHE_BYTES else rates.memory_bytes),
    }


def routed(mixture: Mixture, num_tokens: int) -> np.ndarray:
    """Return the number of tokens of each expert."""
    order = np.random.default_rng(0).random((num_tokens, mixture.num_experts)).argsort(axis=1)[:, : mixture.top_k]
    return np.bincount(order.ravel(), minlength=mixture.num_experts)


def _product_s(counts: np.ndarray, tile_rows: int, outputs: int, inputs: int, stored: int, gpu: GpuName) -> float:
    """Return the seconds of a product with weights of `outputs` rows, which stores `stored` numbers for each slot."""
    rates, num_processors, shared_bytes = GPUS[gpu]
    num_slots, num_read = int(counts.sum()), int((counts > 0).sum())
    row_tiles, columns = int((-(-counts // tile_rows)).sum()), -(-outputs // TILE_OUTPUTS)
    weight_bytes = outputs * inputs * ELEMENT_BYTES
    rows_bytes = num_slots * inputs * ELEMENT_BYTES
    memory_s = (num_read * weight_bytes + rows_bytes + num_slots * stored * ELEMENT_BYTES) / rates.memory_bytes
    cache_s = (rows_bytes * columns + row_tiles * weight_bytes) / rates.cache_bytes
    stage_bytes = (tile_rows + TILE_OUTPUTS) * INPUTS * ELEMENT_BYTES
    programs = max(1, shared_bytes // (NUM_STAGES * stage_bytes))
    groups = tile_rows // 64  # of four warps; each reads its 64 rows, and all weights
    loaded = (num_slots / row_tiles + TILE_OUTPUTS) * INPUTS * ELEMENT_BYTES
    used = (groups * (64 + TILE_OUTPUTS)) * INPUTS * ELEMENT_BYTES + stage_bytes
    block_s = max(
        loaded / min(PORT_BYTES * rates.clocks, programs * (NUM_STAGES - 1) * stage_bytes / LATENCY_S),
        2 * tile_rows * TILE_OUTPUTS * INPUTS * num_processors / (TENSOR_SHARE * rates.matrix_flops),
        used / (SHARED_BYTES * rates.clocks),
        LOOP_INSTRUCTIONS * groups / rates.clocks,
    )
    end_s = GATED_TILE_INSTRUCTIONS * groups / rates.clocks / programs
    items = row_tiles * columns
    processor_s = -(-items // num_processors) * (-(-inputs // INPUTS) * block_s + end_s)
    num_programs = (min(num_slots, len(counts)) + num_slots // tile_rows) * columns
    empty_s = (num_programs - items) * EMPTY_S / (8 * num_processors)
    # Three dependent reads come before the first rows: the tile, its slots, the address of the weight.
    return max(memory_s, cache_s, processor_s) + FIXED_S + 3 * LATENCY_S + empty_s


def table(gpu: GpuName) -> str:
    """Return the estimates of the layers as a table in Markdown."""
    lines = ["| layer | " + " | ".join(f"{rows:,} token{'s' * (rows > 1)}" for rows in ROWS) + " |"]
    lines.append("| --- " * (1 + len(ROWS)) + "|")
    for name, mixture in MIXTURES.items():
        estimates = [estimate_layer(mixture, rows, gpu) for rows in ROWS]
        found = [f"{each.num_read} experts, {1e6 * each.seconds:,.0f} µs, {each.share:.0%}" for each in estimates]
        lines.append(f"| {name} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table of each GPU, and the kernels of each layer."""
    for gpu in GPUS:
        print(f"\n{gpu}\n\n{table(gpu)}\n")
        for name, mixture in MIXTURES.items():
            for rows in ROWS:
                parts_s = estimate_layer(mixture, rows, gpu).parts_s
                print(f"{name}, {rows:,} tokens: " + ", ".join(f"{part} {1e6 * s:.1f}" for part, s in parts_s.items()))


if __name__ == "__main__":
    main()
