"""What latent attention should take on a GPU, by arithmetic. Prints the table of docs/gpu-kernels.md.

The instructions are counted in the machine code for Hopper; `tests/kernels/test_kernel_instructions.py` compares them.
Rates are those of `gpu_estimates`, or assumed.
"""

from dataclasses import dataclass

from gpu_attention_estimates import READ_S
from gpu_decode_estimates import ISSUED, NUM_READS
from gpu_estimates import DEVICES, ELEMENT_BYTES, FIXED_S, SHARED_BYTES, DeviceName

from octavo.kernels.linear.gpu_tiles import H100
from octavo.kernels.paged_attention.gpu_plan import SEGMENT

LATENT, TAIL = 512, 64
MAX_COLUMNS = 32
KEYS = 64
"""Keys of a tile."""
GROUPS = 2
"""Groups of four warps in a program."""
PRODUCTS = 88
"""`wgmma` instructions of a warp for a tile: each group of warps computes the scores of all columns, and sums of half
of the values. Each reads 64 x 16 numbers from shared memory, which takes longer than multiplying so few columns."""
INSTRUCTIONS = 979
"""Instructions of a warp for a tile: the most of all loops."""
FILL_S = 2 * READ_S
"""Seconds until the first keys of a segment arrive: blocks, keys."""
CASES = ((64, 1024, 1), (64, 8192, 1), (1, 8192, 1), (1, 2048, 2048), (1, 8192, 8192))
"""Number of requests, tokens of each, and how many of the tokens are computed."""
MODELS = {"16 heads": 16, "128 heads": 128}


@dataclass(frozen=True)
class LatentEstimate:
    """Estimate of latent attention in one layer."""

    parts_s: dict[str, float]
    """Time of each limit by itself in seconds; the longest counts."""
    fixed_s: float
    flops: float
    latent_bytes: float
    """Bytes of the cache, read once."""

    @property
    def seconds(self) -> float:
        """Time of the complete kernel."""
        return max(self.parts_s.values()) + self.fixed_s


def tile_seconds(device: DeviceName) -> float:
    """Return the time of a tile of keys on a multiprocessor: products and the other instructions do not overlap."""
    products = GROUPS * PRODUCTS * 64 * 16 * ELEMENT_BYTES / SHARED_BYTES
    others = GROUPS * INSTRUCTIONS / ISSUED
    return (products + others) / DEVICES[device].clocks


def estimate_latent(
    batch: int, context: int, num_tokens: int, num_heads: int, device: DeviceName = "H200"
) -> LatentEstimate:
    """Estimate a layer whose requests have `context` keys each, of which the last `num_tokens` are computed."""
    rates = DEVICES[device]
    heads = min(num_heads, MAX_COLUMNS)
    tokens_each = MAX_COLUMNS // heads if num_tokens > 1 else 1
    columns = max(heads * tokens_each, 16)
    row_tiles = batch * -(-num_tokens // tokens_each) * (num_heads // heads)
    keys = context - (num_tokens - 1) / 2
    key_bytes = (LATENT + TAIL) * ELEMENT_BYTES
    segments = row_tiles * max(keys / SEGMENT, 1.0)
    busy = -(-segments // H100.num_multiprocessors)
    sums_bytes = 4 * columns * LATENT * 4 * segments  # a segment's sums, and the total before and after it
    return LatentEstimate(
        {
            "memory": batch * context * key_bytes / rates.memory_bytes,
            "cache": (row_tiles * keys * key_bytes + sums_bytes) / rates.cache_bytes,
            "multiprocessor": busy * (SEGMENT / KEYS * tile_seconds(device) + FILL_S),
        },
        FIXED_S + NUM_READS * READ_S,
        2.0 * batch * num_tokens * num_heads * keys * (2 * LATENT + TAIL),
        batch * context * key_bytes,
    )


def table(device: DeviceName) -> str:
    """Return the estimates as a table in Markdown."""
    lines = ["| heads, requests x keys | time | of the bandwidth | TFLOP/s | memory | cache | multiprocessor |"]
    lines.append("| --- " * 7 + "|")
    for name, heads in MODELS.items():
        for batch, context, num_tokens in CASES:
            found = estimate_latent(batch, context, num_tokens, heads, device)
            title = f"{batch} x {context:,}" if num_tokens == 1 else f"prompt of {context:,}"
            share = found.latent_bytes / DEVICES[device].memory_bytes / found.seconds
            parts = " | ".join(f"{1e6 * part:,.0f} µs" for part in found.parts_s.values())
            times = f"{1e6 * found.seconds:,.0f} µs | {share:.0%} | {1e-12 * found.flops / found.seconds:,.0f}"
            lines.append(f"| {name}, {title} | {times} | {parts} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table of each device."""
    for device in DEVICES:
        print(f"\n{device}\n\n{table(device)}")


if __name__ == "__main__":
    main()
