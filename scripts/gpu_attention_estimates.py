"""What attention of a prompt should take on a GPU, by arithmetic. Prints the tables of docs/gpu-kernels.md.

The instructions are counted in the machine code for Hopper, for heads of 128 dimensions;
`tests/kernels/test_kernel_instructions.py` compares them. Rates are those of `gpu_estimates`, or assumed, as noted.
"""

import heapq
from dataclasses import dataclass

from bench_gpu_parts.shapes import SHAPES, ShapeName, weight_shapes
from gpu_estimates import DEVICES, ELEMENT_BYTES, FIXED_S, MODELS, DeviceName, Epilogue, estimate_product, rows_seconds

from octavo.kernels.linear.gpu_tiles import H100
from octavo.kernels.paged_attention.gpu_plan import SEGMENT

NUM_TOKENS = (512, 2048, 8192, 32768)
HEAD_DIM = 128
ROWS = 128
"""Queries of a tile, in two groups of 4 warps."""
KEYS = 64
"""Keys of a tile."""
WHOLE_INSTRUCTIONS, WHOLE_SOFTMAX = 335, 212
"""Instructions of a warp for a tile of keys that all rows see: the total, and those between its two products."""
EDGE_INSTRUCTIONS, EDGE_SOFTMAX = 457, 278
"""The same two numbers for a tile at the diagonal, with masks."""
SEGMENT_INSTRUCTIONS = 196
"""Instructions of a warp that adds the sums of a segment."""
PROGRAM_INSTRUCTIONS = 1126
"""Instructions of a warp outside of the loops: reading queries, filling two pipelines, dividing and storing results."""
ALONE, TOGETHER = 0.6, 0.8
"""Instructions that a scheduler issues per clock, from a warp of one group and from warps of both groups. Assumed."""
ONES_SHARE = 2 * 8 / HEAD_DIM
"""The product with ones, as a share of the one with values: 8 columns, at half the rate because it is no `wgmma`."""
NUM_READS = 6
"""Dependent reads of a program: tile, request, blocks, keys; blocks and keys of the second loop."""
READ_S = 0.5e-6
"""Seconds of a dependent read, from the second-level cache under load. Assumed."""
LIBRARY_SHARE = 0.95
"""Fraction of the matrix rate that cuBLAS reaches in products with thousands of rows. Assumed."""


@dataclass(frozen=True)
class PrefillEstimate:
    """Estimate of the attention of one layer over a complete prompt."""

    flops: float
    """Operations for all pairs of a query and a key that it sees."""
    parts_s: dict[str, float]
    """Time of each limit by itself in seconds; the longest counts."""
    roofline_s: float
    """Seconds that the operations take at the matrix rate."""

    @property
    def seconds(self) -> float:
        """Time of the complete kernel, with its launch."""
        return max(self.parts_s.values()) + FIXED_S

    @property
    def share(self) -> float:
        """The expected fraction of the roofline."""
        return self.roofline_s / self.seconds

    @property
    def limit(self) -> str:
        """Name of the longest of `parts_s`."""
        return max(self.parts_s, key=lambda part: self.parts_s[part])


def tile_seconds(instructions: int, softmax: int, device: DeviceName, *, is_overlapped: bool = True) -> float:
    """Return the time of a tile of keys on a multiprocessor.

    Both groups of warps begin together, because each tile has a barrier for all. The tensor cores compute the scores
    of one group and then of the other. The softmax of one group overlaps with the products of the other.
    """
    rates = DEVICES[device]
    scores_s = 2 * (ROWS / 2) * KEYS * HEAD_DIM / (rates.matrix_flops / H100.num_multiprocessors)
    values_s = scores_s * (1 + ONES_SHARE)
    alone, together = ALONE * rates.clocks, TOGETHER * rates.clocks
    others_s = 2 * (instructions - softmax) / together
    if not is_overlapped:
        return 2 * (scores_s + values_s) + 2 * softmax / together + others_s
    ahead = min(softmax, scores_s * alone)  # of the first group, while the scores of the second are computed
    both_s = 2 * (softmax - ahead) / together
    return 2 * scores_s + both_s + max(ahead / alone, values_s) + values_s + others_s


def estimate_prefill(
    num_tokens: int, num_heads: int, num_kv_heads: int, device: DeviceName, *, is_overlapped: bool = True
) -> PrefillEstimate:
    """Estimate the attention of one layer over a prompt, with heads of 128 dimensions."""
    rates = DEVICES[device]
    whole_s = tile_seconds(WHOLE_INSTRUCTIONS, WHOLE_SOFTMAX, device, is_overlapped=is_overlapped)
    edge_s = tile_seconds(EDGE_INSTRUCTIONS, EDGE_SOFTMAX, device, is_overlapped=is_overlapped)
    issued = TOGETHER * rates.clocks
    tokens = ROWS // (num_heads // num_kv_heads)
    programs_s, num_tiles = [], 0
    for first in range(0, num_tokens, tokens):
        end = min(first + tokens, num_tokens)
        whole = (first + 1) // KEYS
        edges = -(-(end - whole * KEYS) // KEYS)
        outside = PROGRAM_INSTRUCTIONS + SEGMENT_INSTRUCTIONS * -(-end // SEGMENT)
        spent_s = NUM_READS * READ_S + 2 * outside / issued + whole * whole_s + edges * edge_s
        programs_s += [spent_s] * num_kv_heads
        num_tiles += (whole + edges) * num_kv_heads
    rows_bytes = 2 * num_tokens * (num_heads + num_kv_heads) * HEAD_DIM * ELEMENT_BYTES  # including what is stored
    flops = 4.0 * num_heads * HEAD_DIM * num_tokens * (num_tokens + 1) / 2
    return PrefillEstimate(
        flops=flops,
        parts_s={
            "memory": rows_bytes / rates.memory_bytes,
            "cache": (num_tiles * 2 * KEYS * HEAD_DIM * ELEMENT_BYTES + rows_bytes) / rates.cache_bytes,
            "multiprocessor": _last_end(programs_s),
        },
        roofline_s=max(flops / rates.matrix_flops, rows_bytes / rates.memory_bytes),
    )


def _last_end(programs_s: list[float]) -> float:
    """Return when the last program ends. A multiprocessor runs one at a time; programs with the most keys begin."""
    ends = [0.0] * H100.num_multiprocessors
    for spent_s in sorted(programs_s, reverse=True):
        heapq.heapreplace(ends, ends[0] + spent_s)
    return max(ends)


def attention_of(
    model: ShapeName, num_tokens: int, device: DeviceName, *, is_overlapped: bool = True
) -> PrefillEstimate:
    """Estimate the attention of a layer of a model over a prompt."""
    shape = SHAPES[model]
    assert shape["head_dim"] == HEAD_DIM
    heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    return estimate_prefill(num_tokens, *heads, device, is_overlapped=is_overlapped)


def prefill_share(model: ShapeName, num_tokens: int, device: DeviceName, *, is_library: bool) -> float:
    """Return the fraction of the matrix rate in the prefill of a prompt: all layers; the head multiplies one row.

    Args:
        is_library: whether cuBLAS multiplies; otherwise our own kernels do, with their epilogue.
    """
    shapes = weight_shapes(SHAPES[model])
    attention = attention_of(model, num_tokens, device)
    flops, spent_s = attention.flops, attention.seconds
    for name, (n, k) in shapes.items():
        if name == "head":
            continue
        epilogue: Epilogue = "silu_and_mul" if name == "gate_up" else "none"
        product_flops = 2.0 * num_tokens * n * k
        flops += product_flops
        if is_library:
            spent_s += product_flops / (LIBRARY_SHARE * DEVICES[device].matrix_flops) + FIXED_S
        else:
            spent_s += estimate_product(num_tokens, n, k, "bfloat16", device, epilogue).seconds
    # Two norms read and write rows and residuals; one kernel rotates and stores queries, keys and values.
    rows = [4 * shapes["qkv"][1]] * 2 + [2 * shapes["qkv"][0]]
    rows += [round(1.5 * shapes["gate_up"][0])] if is_library else []  # silu_and_mul
    spent_s += sum(rows_seconds(num_tokens * width * ELEMENT_BYTES, device) for width in rows)
    return flops / DEVICES[device].matrix_flops / spent_s


def table(device: DeviceName) -> str:
    """Return the estimates of all lengths as a table in Markdown."""
    lines = ["| attention of a layer | " + " | ".join(f"{count:,} tokens" for count in NUM_TOKENS) + " |"]
    lines.append("| --- " * (1 + len(NUM_TOKENS)) + "|")
    for model in MODELS:
        for is_overlapped in (True, False):
            found = []
            for count in NUM_TOKENS:
                each = attention_of(model, count, device, is_overlapped=is_overlapped)
                found.append(f"{1e6 * each.seconds:,.0f} µs, {1e-12 * each.flops / each.seconds:,.0f} TFLOP/s")
            title = model if is_overlapped else f"{model}, if no product overlapped"
            lines.append(f"| {title} | " + " | ".join(found) + " |")
    for is_library in (True, False):
        shares = [f"{prefill_share('Llama-3.1-8B', count, device, is_library=is_library):.0%}" for count in NUM_TOKENS]
        title = "cuBLAS" if is_library else "our own products"
        lines.append(f"| prefill of Llama-3.1-8B, {title}: share of the matrix rate | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table for each device."""
    for device in DEVICES:
        print(f"\n{device}\n\n{table(device)}")
        clocks = 1e-6 * DEVICES[device].clocks
        for title, counts in (
            ("whole", (WHOLE_INSTRUCTIONS, WHOLE_SOFTMAX)),
            ("edge", (EDGE_INSTRUCTIONS, EDGE_SOFTMAX)),
        ):
            times = [clocks * 1e6 * tile_seconds(*counts, device, is_overlapped=each) for each in (True, False)]
            print(f"a tile of keys, {title}: {times[0]:,.0f} clocks; {times[1]:,.0f} if no product overlapped")


if __name__ == "__main__":
    main()
