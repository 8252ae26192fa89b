"""What products with quantized weights should take on a GPU, by arithmetic. Prints the table of
docs/gpu-kernels.md.

Tiles and splits are those of `kernels/linear/gpu_quantized.py`. The instructions are counted in the machine code for
Hopper; `tests/kernels/test_quantized_instructions.py` compares them. Other rates are those of `gpu_estimates`.
"""

from dataclasses import dataclass

import torch
from bench_gpu_parts.quantized import FORMATS, LAYER, MODEL, ROWS, Format, QuantizedName
from bench_gpu_parts.quantized_layers import weight_of
from bench_gpu_parts.shapes import SHAPES, weight_shapes
from gpu_estimates import (
    DEVICES,
    EARLY_FIXED_S,
    FIXED_S,
    KERNEL_S,
    LATENCY_S,
    PORT_BYTES,
    TENSOR_SHARE,
    Device,
    DeviceName,
)

from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS
from octavo.kernels.linear.gpu_tiles import H100

ISSUED, ISSUED_ALONE = 0.7, 0.5
"""Instructions per clock of a scheduler, for programs that share a multiprocessor and for one alone. Assumed."""
LARGEST_END_INSTRUCTIONS = 1020
"""Instructions of a warp outside of the loop over inputs, for the largest tiles: the most of all launches."""
NUM_SCHEDULERS = 4
"""Schedulers of a multiprocessor."""
SHARING = 1.5
"""Programs per multiprocessor from which most of them share one."""
EIGHT_BIT_RATE = 2.0
"""Rate of int8 or float8 products as a multiple of the bfloat16 rate."""


@dataclass(frozen=True)
class QuantizedEstimate:
    """Estimate of a product."""

    parts_s: dict[str, float]
    """Seconds of each limit by itself: memory, cache, multiprocessor. The longest counts."""
    fixed_s: float
    """Seconds of launches, the first copies, and adding up splits."""
    num_bytes: float
    flops: float
    roofline_s: float

    @property
    def seconds(self) -> float:
        """Time of the complete product."""
        return max(self.parts_s.values()) + self.fixed_s


def estimate_product(
    name: QuantizedName, num_rows: int, num_outputs: int, num_inputs: int, device: DeviceName
) -> QuantizedEstimate:
    """Estimate a product of rows with a weight."""
    form, rates = FORMATS[name], DEVICES[device]
    weight = weight_of(name, num_outputs, num_inputs, torch.device("meta"))
    product = QuantizedProduct(weight, None, H100, torch.empty(0, device="meta"))
    launch = product.launch(num_rows)
    is_8_bit = form.kind in ("s8", "f8")
    row_tiles, output_tiles = -(-num_rows // launch.rows), num_outputs // TILE_OUTPUTS
    weight_bytes = form.weight_bytes(num_outputs, num_inputs)
    rows_bytes, out_bytes = num_rows * num_inputs * (1 if is_8_bit else 2), 2 * num_rows * num_outputs
    sums_bytes = 2 * 4 * launch.rows * row_tiles * num_outputs * launch.num_splits * launch.is_spread
    num_items = launch.num_tiles * (launch.num_splits if launch.is_spread else 1)
    splits_of_item = 1 if launch.is_spread else launch.num_splits
    blocks = product.split_blocks * splits_of_item
    issued = ISSUED if num_items * launch.num_warps >= 4 * SHARING * H100.num_multiprocessors else ISSUED_ALONE
    issued *= NUM_SCHEDULERS / launch.num_warps * rates.clocks
    is_largest = launch.num_warps > NUM_SCHEDULERS
    item_s = blocks * block_seconds(
        form, launch.rows, form.loop_instructions[is_largest] / issued, weight.chunk * weight.num_chunks, rates
    )
    item_s += splits_of_item * end_instructions(form, launch.num_warps, launch.num_splits * launch.is_spread) / issued
    # Programs that share a multiprocessor take turns, so the number per multiprocessor counts.
    waves = -(-num_items // H100.num_multiprocessors)
    flops = 2.0 * num_rows * num_outputs * num_inputs
    matrix_flops = rates.matrix_flops * (EIGHT_BIT_RATE if is_8_bit else 1.0)
    fixed_s = FIXED_S
    if launch.is_spread:
        fixed_s += LATENCY_S + 4 * launch.rows * TILE_OUTPUTS * launch.num_splits / (PORT_BYTES * rates.clocks)
    if is_8_bit:
        fixed_s += KERNEL_S + 3 * num_rows * num_inputs / rates.cache_bytes
    num_bytes = weight_bytes + 2 * num_rows * num_inputs + out_bytes
    return QuantizedEstimate(
        parts_s={
            "memory": (weight_bytes + rows_bytes + out_bytes) / rates.memory_bytes,
            "cache": (rows_bytes * output_tiles + weight_bytes * row_tiles + out_bytes + sums_bytes)
            / rates.cache_bytes,
            "multiprocessor": waves * item_s,
        },
        fixed_s=fixed_s,
        num_bytes=num_bytes,
        flops=flops,
        roofline_s=max(num_bytes / rates.memory_bytes, flops / matrix_flops),
    )


def end_instructions(form: Format, num_warps: int, num_programs: int = 1) -> float:
    """Return the instructions of a warp outside of the loop over inputs; `num_programs` programs share a tile."""
    if num_warps > NUM_SCHEDULERS:
        return LARGEST_END_INSTRUCTIONS
    common, last = form.end_instructions
    return common + last / max(1, num_programs)


def block_seconds(form: Format, rows: int, issue_s: float, block: int, rates: Device) -> float:
    """Return the seconds of a block of inputs of a tile on a multiprocessor: the longest of copies, instructions and
    products, which overlap with those of the other program. `issue_s`: seconds of the instructions."""
    is_8_bit = form.kind in ("s8", "f8")
    group_bytes = TILE_OUTPUTS * form.scale_bytes * block / form.group_size if form.group_size else 0.0
    copied = TILE_OUTPUTS * block * form.code_bits / 8 + group_bytes + rows * block * (1 if is_8_bit else 2)
    matrix_flops = TENSOR_SHARE * rates.matrix_flops / H100.num_multiprocessors * (EIGHT_BIT_RATE if is_8_bit else 1)
    return max(
        copied / (PORT_BYTES * rates.clocks),
        issue_s,
        2 * rows * TILE_OUTPUTS * block / matrix_flops,
    )


def estimate_layer(name: QuantizedName, num_rows: int, device: DeviceName) -> tuple[float, float, str]:
    """Return the seconds of a layer's products, the fraction of the roofline, and the limit of the largest product."""
    shapes = weight_shapes(SHAPES[MODEL])
    found = [estimate_product(name, num_rows, *shapes[part], device) for part in LAYER]
    seconds = sum(each.seconds for each in found)
    largest = max(found, key=lambda each: each.seconds)
    limit = max(largest.parts_s, key=lambda part: largest.parts_s[part])
    return seconds, sum(each.roofline_s for each in found) / seconds, limit


def table(device: DeviceName) -> str:
    """Return the estimates of all formats as a table in Markdown."""
    lines = ["| weights | " + " | ".join(f"{rows:,} rows" for rows in ROWS) + " |", "| --- " * (1 + len(ROWS)) + "|"]
    for name in FORMATS:
        found = [estimate_layer(name, rows, device) for rows in ROWS]
        cells = [f"{1e6 * seconds:,.0f} µs, {share:.0%} ({limit})" for seconds, share, limit in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bounds(name: QuantizedName, num_rows: int, device: DeviceName) -> tuple[float, float, float]:
    """Return the highest fractions of the roofline that better kernels could reach in a layer's products.

    The first is for instructions that take no time, with today's launches. The second is for launches that overlap with
    the kernel before, with today's instructions. The third is for both together.
    """
    shapes = weight_shapes(SHAPES[MODEL])
    found = [estimate_product(name, num_rows, *shapes[part], device) for part in LAYER]
    roofline_s, fixed_s = sum(each.roofline_s for each in found), sum(each.fixed_s for each in found)
    memory_s = sum(each.parts_s["memory"] for each in found)
    early_s = fixed_s - len(found) * (FIXED_S - EARLY_FIXED_S)
    longest_s = sum(max(each.parts_s.values()) for each in found)
    return roofline_s / (memory_s + fixed_s), roofline_s / (longest_s + early_s), roofline_s / (memory_s + early_s)


def bounds_table(device: DeviceName) -> str:
    """Return the bounds of decodes of 16 rows as a table in Markdown."""
    lines = ["| weights | now | no instructions | early launches | both |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in FORMATS:
        shares = (estimate_layer(name, 16, device)[1], *bounds(name, 16, device))
        lines.append(f"| {name} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    for device in DEVICES:
        print(f"\n{device}\n\n{table(device)}")
    print(f"\nH200, bounds\n\n{bounds_table('H200')}")
