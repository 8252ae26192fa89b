"""What attention of towers should take on a GPU, by arithmetic. Prints the table of docs/gpu-kernels.md.

The instructions are counted in the machine code for Hopper; `tests/kernels/test_kernel_instructions.py` compares them.
Rates are those of `gpu_estimates` and `gpu_attention_estimates`, or assumed, as noted.
"""

from dataclasses import dataclass

from bench_gpu_parts.towers import TOWER_RUNS, TowerRun
from gpu_attention_estimates import ALONE, READ_S, TOGETHER
from gpu_estimates import DEVICES, FIXED_S, DeviceName

from octavo.kernels.linear.gpu_tiles import H100
from octavo.kernels.varlen_attention.parts import LARGE_TILE, SMALL_TILE

KEYS = 64
"""Keys of a tile."""
INSTRUCTIONS = {64: 256, 80: 302, 128: 319}
"""Instructions of a warp for a tile of keys, by the padded head dimension."""
SOFTMAX_INSTRUCTIONS = 212
"""Instructions between a tile's two products, as in attention of prompts. Assumed."""
PROGRAM_INSTRUCTIONS = 1000
"""Instructions of a warp outside of the loop: reading queries, masking the last keys, dividing and storing results.
Assumed."""
NUM_READS = 3
"""Dependent reads of a program: tile, queries, keys."""
TOGETHER_DIM = 64
"""Largest head dimension for which two large programs fit the registers of a multiprocessor."""
NUM_SMALL = 3
"""Number of small programs that fit the registers of a multiprocessor."""
NUM_ONES = 8
"""Columns of the product with ones, which has half the rate."""


@dataclass(frozen=True)
class TowerEstimate:
    """Estimate of the attention of one layer."""

    seconds: float
    """Seconds, including the launch."""
    roofline_s: float
    """Seconds of its operations, or of its bytes, at the device's rate; the larger."""

    @property
    def share(self) -> float:
        """The expected fraction of the roofline."""
        return self.roofline_s / self.seconds


def estimate_attention(run: TowerRun, device: DeviceName) -> TowerEstimate:
    """Estimate the attention of one layer in a run."""
    rates = DEVICES[device]
    rows = LARGE_TILE if run.length > SMALL_TILE else SMALL_TILE
    dims = next(size for size in INSTRUCTIONS if size >= run.head_dim)
    num_at_once = NUM_SMALL if rows == SMALL_TILE else 2 if dims <= TOGETHER_DIM else 1
    warps = rows // 16 / 4  # per scheduler, from each program
    products_s = (4 * dims + 2 * 2 * NUM_ONES) * rows * KEYS / (rates.matrix_flops / H100.num_multiprocessors)
    # Programs on one multiprocessor overlap: some multiply while others compute the softmax.
    tile_s = max(products_s, warps * INSTRUCTIONS[dims] / (TOGETHER * rates.clocks))
    if num_at_once == 1:
        tile_s = _tile_seconds(dims, device)
    outside_s = NUM_READS * READ_S / num_at_once + warps * PROGRAM_INSTRUCTIONS / (TOGETHER * rates.clocks)
    program_s = outside_s + -(-run.length // KEYS) * tile_s
    num_programs = -(-run.length // rows) * run.num_parts * run.num_heads
    waves = -(-num_programs // H100.num_multiprocessors)
    roofline_s = max(run.flops / rates.matrix_flops, run.num_bytes / rates.memory_bytes)
    return TowerEstimate(waves * program_s + FIXED_S, roofline_s)


def _tile_seconds(dims: int, device: DeviceName) -> float:
    """Return the time of a tile of keys of a program alone: see `gpu_attention_estimates.tile_seconds`."""
    rates = DEVICES[device]
    scores_s = 2 * (LARGE_TILE / 2) * KEYS * dims / (rates.matrix_flops / H100.num_multiprocessors)
    values_s = scores_s * (1 + 2 * NUM_ONES / dims)
    alone, together = ALONE * rates.clocks, TOGETHER * rates.clocks
    ahead = min(SOFTMAX_INSTRUCTIONS, scores_s * alone)
    others = 2 * (INSTRUCTIONS[dims] - ahead) / together
    return 2 * scores_s + max(ahead / alone, values_s) + values_s + others


def table(device: DeviceName) -> str:
    """Return the estimates as a table in Markdown."""
    lines = ["| attention of a layer | parts | time | share of the roofline |", "| --- | --- | --- | --- |"]
    for name, run in TOWER_RUNS.items():
        found = estimate_attention(run, device)
        parts = f"{run.num_parts} x {run.length:,}, {run.num_heads} heads of {run.head_dim}"
        lines.append(f"| {name} | {parts} | {1e6 * found.seconds:,.0f} µs | {found.share:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table("H200"))
