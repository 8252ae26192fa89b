"""What our own products should take on a GPU, by arithmetic. Prints the table of docs/gpu-kernels.md.

The tiles, programs and stages are those that `kernels/linear/gpu_tiles.py` chooses. The instructions are counted in the
machine code for Hopper; `tests/kernels/test_kernel_instructions.py` compares them. The rates of the hardware are the
vendor's or assumptions, as noted beside each.
"""

from dataclasses import dataclass
from typing import Literal

from bench_gpu_parts.shapes import SHAPES, ShapeName, weight_shapes

from octavo.kernels.linear.gpu import USUAL_RANKS
from octavo.kernels.linear.gpu_product import GROUPED_ROWS
from octavo.kernels.linear.gpu_tiles import H100, Launch, Tiling

DeviceName = Literal["H100", "H200"]
DtypeName = Literal["bfloat16", "float16"]
Epilogue = Literal["none", "silu_and_mul", "residual"]
"""What a product does with its results before it stores them: halves are combined, or another matrix is added. There is
no kernel for the latter, because it would gain nothing."""
MODELS: tuple[ShapeName, ...] = ("Qwen3-0.6B", "Llama-3.1-8B")
ROWS = (1, 16, 64, 256, 2048, 8192)
ELEMENT_BYTES = 2

LOOP_INSTRUCTIONS = 123
"""Instructions of a warp for a block of 64 inputs: the maximum over all launches."""
TILE_INSTRUCTIONS = 791
"""Instructions of a warp at the end of a tile, to convert, exchange and store results: the maximum of all launches."""
GATED_TILE_INSTRUCTIONS = 1472
"""The same with the epilogue `silu_and_mul`."""
TENSOR_SHARE = 0.9
"""Share of a loop's time in which the tensor cores work: each block of inputs has a barrier. Assumed."""
FIXED_S = 2.0e-6
"""Seconds from the end of the previous kernel to the first product in a graph: launch, barriers, loads. Assumed."""
EARLY_FIXED_S = 0.8e-6
"""The same for a product that begins before the kernel ahead of it ends: the wait, and the first copies, of which the
weights are in the cache. Assumed."""
KERNEL_S = 1.5e-6
"""The same for a kernel that only reads and writes rows. Assumed."""
LATENCY_S = 0.8e-6
"""Latency of a memory read under load, in seconds. Assumed."""
PORT_BYTES = 64
"""Bytes that a multiprocessor reads from the L2 cache per clock."""
SHARED_BYTES = 128
"""Bytes that a multiprocessor's shared memory reads or writes per clock."""
GROUP_ROW_TILES = 8
"""Row tiles that share a read of the weight."""
NVLINK_BYTES = 400e9
"""Bytes that a GPU receives from the others per second: about nine tenths of the vendor's figure. Assumed."""
EXCHANGE_S = 5.0e-6
"""Seconds of an all-reduce in addition to its transfers: the launch, and waiting for the other ranks. Assumed."""
FEW_BYTES = 1 << 20
"""See `octavo.worker_proc.parallel.distributed`."""
NUM_SEGMENTS = 8
CACHE_BYTES = 25 << 20
"""Bytes of the L2 cache available for a weight that is read again: half of the cache."""


@dataclass(frozen=True)
class Device:
    """Rates of a GPU, per second."""

    memory_bytes: float
    """About nine tenths of the vendor's figure: what copies reach."""
    cache_bytes: float
    """From the second-level cache to all multiprocessors. Assumed: published products on Hopper with tiles of 128 x 128
    and no multicast reach about 600e12 flops, which takes so much."""
    matrix_flops: float
    """Rate of a large product of bfloat16 matrices; the power limit keeps it below the vendor's 989e12."""
    clocks: float


DEVICES: dict[DeviceName, Device] = {
    "H100": Device(3.0e12, 9.4e12, 750e12, 1.755e9),
    "H200": Device(4.3e12, 9.4e12, 790e12, 1.755e9),
}


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a product, and the limits that it follows from."""

    launch: Launch
    """Tile, stages, tiles and programs."""
    num_splits: int
    waves: float
    """Programs, or their tiles one after another, per multiprocessor."""
    num_bytes: float
    """Bytes read from memory and written to it."""
    cache_bytes: float
    """Bytes moved between the L2 cache and the multiprocessors: rows and weights of each tile, sums of splits."""
    flops: float
    """Floating-point operations, without the padding of tiles."""
    parts_s: dict[str, float]
    """Seconds by limit: memory, cache, multiprocessor. The longest one counts."""
    fixed_s: float
    """Seconds added to the longest of `parts_s`: the launch, and adding the splits."""
    roofline_s: float
    """Seconds for the bytes that must be moved, or for the flops, at the device's rates."""

    @property
    def seconds(self) -> float:
        """Estimated seconds of the complete product."""
        return max(self.parts_s.values()) + self.fixed_s

    @property
    def share(self) -> float:
        """The expected fraction of the roofline."""
        return self.roofline_s / self.seconds

    @property
    def limit(self) -> str:
        """The longest of `parts_s`."""
        return max(self.parts_s, key=lambda part: self.parts_s[part])


def estimate_product(
    m: int,
    n: int,
    k: int,
    dtype: DtypeName,
    device: DeviceName,
    epilogue: Epilogue = "none",
    tiling: Tiling | None = None,
) -> Estimate:
    """Estimate a product of `m` rows with a weight of `n` outputs and `k` inputs, by our own kernels.

    `tiling`: None: that of a weight that is not tp-invariant.
    """
    assert dtype in ("bfloat16", "float16"), "two bytes each"
    rates, tiling = DEVICES[device], tiling or Tiling(n, k, ELEMENT_BYTES, H100)
    launch = tiling.launch(m, is_gated=epilogue == "silu_and_mul")
    tile = launch.tile
    row_tiles, output_tiles = -(-m // tile.rows), -(-n // tile.outputs)
    rows_bytes, weight_bytes, out_bytes = m * k * ELEMENT_BYTES, n * k * ELEMENT_BYTES, m * n * ELEMENT_BYTES
    out_bytes = int(out_bytes * {"none": 1, "silu_and_mul": 0.5, "residual": 2}[epilogue])
    times_read = 1 if weight_bytes <= CACHE_BYTES else -(-row_tiles // GROUP_ROW_TILES)
    num_bytes = rows_bytes + weight_bytes * times_read + out_bytes
    num_sums = tiling.num_splits if launch.is_spread else launch.num_groups if launch.num_groups > 1 else 0
    sums_bytes = 4 * m * n * num_sums * 2
    cache_bytes = rows_bytes * output_tiles + weight_bytes * row_tiles + out_bytes + sums_bytes
    items = launch.num_tiles * (tiling.num_splits if launch.is_spread else launch.num_groups)
    splits_of_item = 1 if launch.is_spread else tiling.num_splits // launch.num_groups
    item_s = splits_of_item * _split_seconds(tiling, launch, min(m, tile.rows), rates, epilogue)
    flops = 2.0 * m * n * k
    return Estimate(
        launch=launch,
        num_splits=tiling.num_splits,
        waves=items / H100.num_multiprocessors,
        num_bytes=num_bytes,
        cache_bytes=cache_bytes,
        flops=flops,
        parts_s={
            "memory": num_bytes / rates.memory_bytes,
            "cache": cache_bytes / rates.cache_bytes,
            "multiprocessor": -(-items // H100.num_multiprocessors) * item_s,
        },
        fixed_s=FIXED_S + _adding_seconds(tiling, launch, min(m, tile.rows), rates),
        roofline_s=max(
            (rows_bytes + weight_bytes + out_bytes) / rates.memory_bytes,
            flops / rates.matrix_flops,
        ),
    )


def _split_seconds(tiling: Tiling, launch: Launch, num_rows: int, rates: Device, epilogue: Epilogue) -> float:
    """Return the time of a split of a tile on a multiprocessor by itself, beginning to end.

    In each block of inputs the copies, the tensor cores, the shared memory and the instructions overlap; the end of a
    tile does not overlap with its products.
    """
    tile = launch.tile
    loaded = (num_rows + tile.outputs) * tile.inputs * ELEMENT_BYTES  # rows beyond the end are not read
    in_flight = (tile.num_stages - 1) * (tile.rows + tile.outputs) * tile.inputs * ELEMENT_BYTES
    groups = tile.num_warps // 4  # each reads its 64 rows, and all weights
    used = groups * (64 + tile.outputs) * tile.inputs * ELEMENT_BYTES
    stored = (tile.rows + tile.outputs) * tile.inputs * ELEMENT_BYTES
    matrix_flops = TENSOR_SHARE * rates.matrix_flops / H100.num_multiprocessors
    block_s = max(
        loaded / min(PORT_BYTES * rates.clocks, in_flight / LATENCY_S),
        2 * tile.rows * tile.outputs * tile.inputs / matrix_flops,
        (used + stored) / (SHARED_BYTES * rates.clocks),
        LOOP_INSTRUCTIONS * tile.num_warps / 4 / rates.clocks,
    )
    instructions = GATED_TILE_INSTRUCTIONS if epilogue == "silu_and_mul" else TILE_INSTRUCTIONS
    end_s = instructions * tile.num_warps / 4 / rates.clocks
    if epilogue == "residual" and not launch.is_spread:  # nothing hides the read, which the last split needs
        end_s += LATENCY_S / tiling.num_splits
    return tiling.split_inputs / tile.inputs * block_s + end_s


def _adding_seconds(tiling: Tiling, launch: Launch, num_rows: int, rates: Device) -> float:
    """Return the time in which the last program of a tile reads the sums of all splits; all tiles do at once.

    Sums of groups are added up by another kernel, whose bytes count with those of the product.
    """
    if launch.num_groups > 1:
        return KERNEL_S
    if not launch.is_spread:
        return 0.0
    sums_bytes = 4 * num_rows * launch.tile.outputs * tiling.num_splits
    return LATENCY_S + sums_bytes / (PORT_BYTES * rates.clocks)


def table(device: DeviceName) -> str:
    """Return the estimates of all weights of the models as a table in Markdown."""
    lines = ["| weight | outputs x inputs | splits | " + " | ".join(f"{rows:,} rows" for rows in ROWS) + " |"]
    lines.append("| --- " * (3 + len(ROWS)) + "|")
    for model in MODELS:
        for name, (n, k) in weight_shapes(SHAPES[model]).items():
            estimates = [estimate_product(m, n, k, "bfloat16", device) for m in ROWS]
            found = [f"{1e6 * each.seconds:,.0f} µs, {each.share:.0%} ({each.limit})" for each in estimates]
            lines.append(f"| {model} {name} | {n} x {k} | {estimates[0].num_splits} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def rows_seconds(num_bytes: float, device: DeviceName) -> float:
    """Return the time of a kernel that only reads and writes rows, of which the second-level cache keeps a part."""
    rates = DEVICES[device]
    return KERNEL_S + num_bytes / (rates.cache_bytes if num_bytes <= CACHE_BYTES else rates.memory_bytes)


def epilogue_seconds(model: ShapeName, m: int, device: DeviceName, epilogue: Epilogue) -> tuple[float, float]:
    """Return the time of a layer's products that could have an epilogue, and of the kernels after them: apart, fused.

    `silu_and_mul` belongs to gate_up. The residual would be added by out and down, and a norm would remain.
    """
    shapes = weight_shapes(SHAPES[model])
    names = ("gate_up",) if epilogue == "silu_and_mul" else ("out", "down")
    apart_s = fused_s = 0.0
    for n, k in (shapes[name] for name in names):
        out_bytes = m * n * ELEMENT_BYTES
        after_bytes = (1.5 if epilogue == "silu_and_mul" else 4) * out_bytes
        apart_s += estimate_product(m, n, k, "bfloat16", device).seconds + rows_seconds(after_bytes, device)
        fused_s += estimate_product(m, n, k, "bfloat16", device, epilogue).seconds
        fused_s += rows_seconds(2 * out_bytes, device) if epilogue == "residual" else 0.0
    return apart_s, fused_s


def epilogue_table(device: DeviceName) -> str:
    """Return what each epilogue would save, as a table in Markdown."""
    lines = ["| epilogue | " + " | ".join(f"{rows:,} rows" for rows in ROWS) + " |", "| --- " * (1 + len(ROWS)) + "|"]
    epilogues: tuple[Epilogue, ...] = ("silu_and_mul", "residual")
    for model in MODELS:
        for epilogue in epilogues:
            pairs = [epilogue_seconds(model, m, device, epilogue) for m in ROWS]
            found = [f"{1e6 * apart:,.0f} -> {1e6 * fused:,.0f} µs" for apart, fused in pairs]
            lines.append(f"| {model} {epilogue} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def layers_share(model: ShapeName, m: int, device: DeviceName, *, is_early: bool = False) -> float:
    """Return the expected fraction of the roofline of all products of a layer together.

    `is_early`: with programmatic dependent launches.
    """
    shapes = [shape for name, shape in weight_shapes(SHAPES[model]).items() if name != "head"]
    estimates = [estimate_product(m, n, k, "bfloat16", device) for n, k in shapes]
    saved_s = (FIXED_S - EARLY_FIXED_S) * is_early
    return sum(each.roofline_s for each in estimates) / sum(each.seconds - saved_s for each in estimates)


def rank_seconds(
    model: ShapeName, m: int, num_ranks: int, device: DeviceName, *, is_tp_invariant: bool, has_sums: bool = True
) -> float:
    """Return the time of a layer's products and, `has_sums`, of its two sums over the ranks, by our own kernels."""
    seconds = 0.0
    for name, (n, k) in weight_shapes(SHAPES[model]).items():
        if name in ("qkv", "gate_up"):
            part = n // num_ranks
            tiling = Tiling(part, k, ELEMENT_BYTES, H100, usual_outputs=-(-n // USUAL_RANKS) * is_tp_invariant)
            seconds += estimate_product(m, part, k, "bfloat16", device, tiling=tiling).seconds
        elif name in ("out", "down"):
            num_segments = NUM_SEGMENTS // num_ranks if is_tp_invariant else 0
            tiling = Tiling(n, k // num_ranks, ELEMENT_BYTES, H100, num_segments)
            is_grouped = tiling.launch(m).num_groups > 1
            rows = [min(GROUPED_ROWS, m - start) for start in range(0, m, GROUPED_ROWS)] if is_grouped else [m]
            for each in rows:
                seconds += estimate_product(each, n, k // num_ranks, "bfloat16", device, tiling=tiling).seconds
            if has_sums:
                seconds += sum_seconds(m * n, num_ranks, 4 if is_tp_invariant else ELEMENT_BYTES)
    return seconds


def sum_seconds(num_results: int, num_ranks: int, part_bytes: int) -> float:
    """Return the time in which ranks add up their parts: all of them at once, or each a share and then all results."""
    if num_ranks == 1:
        return 0.0
    num_others = num_ranks - 1
    if num_results * part_bytes <= FEW_BYTES:
        return EXCHANGE_S + num_others * num_results * part_bytes / NVLINK_BYTES
    return 2 * EXCHANGE_S + num_others / num_ranks * num_results * (part_bytes + ELEMENT_BYTES) / NVLINK_BYTES


def rank_table(device: DeviceName) -> str:
    """Return what `--enable-tp-invariant-inference` costs, as a table in Markdown."""
    counts = (1, 2, 4, 8)
    lines = ["| layer, rows | " + " | ".join(f"{count} ranks" for count in counts) + " |"]
    lines.append("| --- " * (1 + len(counts)) + "|")
    for model in MODELS:
        for m in ROWS:
            pairs = [
                [rank_seconds(model, m, count, device, is_tp_invariant=is_on) for is_on in (False, True)]
                for count in counts
            ]
            found = [f"{1e6 * off:,.0f} -> {1e6 * on:,.0f} µs" for off, on in pairs]
            lines.append(f"| {model}, {m:,} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table for each device."""
    for device in DEVICES:
        print(f"\n{device}\n\n{table(device)}\n\n{epilogue_table(device)}\n\n{rank_table(device)}\n")
        for model in MODELS:
            for is_early, way in ((False, ""), (True, ", launched early")):
                shares = ", ".join(
                    f"{rows:,}: {layers_share(model, rows, device, is_early=is_early):.0%}" for rows in ROWS
                )
                print(f"{model}, all products of a layer{way}, by rows: {shares}")


if __name__ == "__main__":
    main()
