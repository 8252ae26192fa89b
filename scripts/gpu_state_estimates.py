"""What recurrences should take on a GPU, by arithmetic. Prints the table of docs/gpu-kernels.md.

The tiles are those of `kernels/gpu_recurrence.py`. The instructions are counted in the machine code for Hopper;
`tests/kernels/test_kernel_instructions.py` compares them. Other rates are those of `gpu_estimates`.
"""

from dataclasses import dataclass

from bench_gpu_parts.recurrences import RECURRENCES, Recurrence
from gpu_estimates import DEVICES, ELEMENT_BYTES, KERNEL_S, DeviceName

from octavo.kernels.gpu_recurrence import tile_columns

SCAN_INSTRUCTIONS, DELTA_INSTRUCTIONS = 317, 514
"""Instructions of a warp for a token."""
CONV_INSTRUCTIONS = 1056
"""Instructions of a warp of a convolution for 4 rows of 128 channels; a decode has one of the rows."""
ONCE_INSTRUCTIONS = 300
"""Instructions of a warp before and after all tokens: the state is loaded and stored."""
CONV_ROWS, CONV_CHANNELS = 4, 128
NUM_SCHEDULERS = 132 * 4
ISSUED = 0.7
"""Instructions per clock of a scheduler with several warps. Assumed."""
ALONE_CLOCKS = 2.0
"""Clocks per instruction of a warp that has a scheduler for itself. Assumed."""
STEPS = ((1, 1), (64, 1), (256, 1), (1, 2048), (4, 2048))
"""Number of requests, and tokens of each."""


@dataclass(frozen=True)
class StateEstimate:
    """Estimate of the convolution and the recurrence of a layer."""

    parts_s: dict[str, float]
    """Seconds of each limit of the recurrence by itself: memory, instructions. The longest counts."""
    fixed_s: float
    """Seconds of the convolution and of two launches."""
    num_bytes: int
    """Bytes that must be moved."""
    roofline_s: float
    """Seconds of moving `num_bytes` at the device's rate."""

    @property
    def seconds(self) -> float:
        """Time of both kernels."""
        return max(self.parts_s.values()) + self.fixed_s

    @property
    def share(self) -> float:
        """The expected fraction of the roofline."""
        return self.roofline_s / self.seconds


def estimate_recurrence(layer: Recurrence, num_requests: int, num_tokens: int, device: DeviceName) -> StateEstimate:
    """Estimate a step in which each request computes `num_tokens` tokens."""
    rates = DEVICES[device]
    tiles = -(-layer.num_columns // tile_columns(layer.num_rows, layer.num_columns))
    warps = -(-num_requests * layer.num_heads * tiles // NUM_SCHEDULERS)
    instructions = num_tokens * (DELTA_INSTRUCTIONS if layer.is_delta_rule else SCAN_INSTRUCTIONS) + ONCE_INSTRUCTIONS
    value_bytes = num_requests * num_tokens * layer.num_heads * layer.num_columns * ELEMENT_BYTES
    rows_bytes = num_requests * num_tokens * layer.channels * ELEMENT_BYTES
    scan_bytes = 2 * num_requests * layer.state_bytes + rows_bytes + value_bytes
    conv_bytes = 2 * num_requests * layer.conv_state_bytes + 2 * rows_bytes
    parts_s = {
        "memory": scan_bytes / rates.memory_bytes,
        "instructions": max(ALONE_CLOCKS, warps / ISSUED) * instructions / rates.clocks,
    }
    conv_tiles = num_requests * -(-num_tokens // CONV_ROWS) * -(-layer.channels // CONV_CHANNELS)
    conv_s = conv_tiles * CONV_INSTRUCTIONS / (NUM_SCHEDULERS * ISSUED * rates.clocks)
    fixed_s = max(conv_bytes / rates.memory_bytes, conv_s) + 2 * KERNEL_S
    num_bytes = scan_bytes + conv_bytes
    return StateEstimate(parts_s, fixed_s, num_bytes, num_bytes / rates.memory_bytes)


def table(device: DeviceName) -> str:
    """Return the estimates of the layers as a table in Markdown."""
    titles = [f"{num} x {tokens:,} token{'s' * (tokens > 1)}" for num, tokens in STEPS]
    lines = ["| layer | " + " | ".join(titles) + " |", "| --- " * (1 + len(STEPS)) + "|"]
    for name, layer in RECURRENCES.items():
        estimates = [estimate_recurrence(layer, *step, device) for step in STEPS]
        found = [f"{1e6 * each.seconds:,.0f} µs, {each.share:.0%}" for each in estimates]
        lines.append(f"| {name} | " + " | ".join(found) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table("H200"))
