"""What decodes should take on a GPU, by arithmetic. Prints the tables of docs/gpu-kernels.md.

Work is divided by `gpu_plan` itself. The instructions are counted in the machine code for Hopper, for heads of 128
dimensions; `tests/kernels/test_kernel_instructions.py` compares them. Rates are those of `gpu_estimates`, or assumed.
"""

from dataclasses import dataclass

import numpy as np
from bench_gpu_parts.shapes import SHAPES, ShapeName, weight_shapes
from gpu_attention_estimates import LIBRARY_SHARE, READ_S, prefill_share
from gpu_estimates import DEVICES, ELEMENT_BYTES, FIXED_S, KERNEL_S, DeviceName, estimate_product, rows_seconds

from octavo.kernels.linear.gpu_tiles import H100
from octavo.kernels.paged_attention.gpu_plan import ENTRY_WORDS, ITEM_WORDS, SEGMENT, Grid, Layout, limits_of, write
from octavo.kernels.paged_attention.gpu_prefixes import Prefixes
from octavo.kernels.paged_attention.shape import AttentionShape

HEAD_DIM = 128
CASES = ((64, 1024, 0), (256, 1024, 0), (64, 8192, 0), (64, 4352, 4096))
"""Number of requests, keys of each, and how many of the keys they share."""
KEYS = 64
"""Keys of a tile."""
SHARED_ROWS = 32
OWN_INSTRUCTIONS, SHARED_INSTRUCTIONS = 458, 425
"""Instructions of a warp for a tile of keys: of one request, and of several requests that share it."""
ISSUED = 0.6
"""Instructions that a scheduler issues per clock, from a warp of each of two programs. Assumed."""
NUM_READS = 5
"""Dependent reads before the first keys arrive: unit, entry, queries, blocks, keys."""
OUTSIDE_KERNELS = 7
"""Kernels of a decode outside its layers, without the product with the output weight and the seven of sampling."""
SAMPLING_S, SAMPLED_ROW_S = 21e-6, 33e-6 / 64
"""Seconds of sampling for a step, and for a row of 152 k logits, with temperature: see docs/gpu-kernels.md."""
DECODE_LIBRARY_SHARE = 0.9
"""Fraction of the bandwidth that cuBLAS reaches in products with few rows. Assumed."""


@dataclass(frozen=True)
class DecodeEstimate:
    """Estimate of the attention of one layer of a decode."""

    kv_bytes: float
    """Bytes of keys and values; shared ones count once."""
    parts_s: dict[str, float]
    """Time of each limit by itself in seconds; the longest counts."""
    fixed_s: float
    """Seconds added to the limit: the launch, the first keys, and adding up partial sums."""

    @property
    def seconds(self) -> float:
        """Time of the complete kernel."""
        return max(self.parts_s.values()) + self.fixed_s


def estimate_decode(
    batch: int, context: int, num_shared: int, num_heads: int, num_kv_heads: int, device: DeviceName
) -> DecodeEstimate:
    """Estimate the attention of a layer, with heads of 128 dimensions, for requests that share their first keys."""
    rates, group = DEVICES[device], num_heads // num_kv_heads
    num_programs = 2 * H100.num_multiprocessors
    grid = Grid(128 // group, 16 // group, SHARED_ROWS // group, group, num_kv_heads, num_programs)
    starts, lens = np.arange(batch + 1), np.full(batch, context)
    layout = Layout.of(limits_of(grid, starts, lens), grid)
    words = np.zeros(layout.num_words, dtype=np.int32)
    segments = -(-context // SEGMENT)
    labels = np.arange(1, batch * segments + 1).reshape(batch, segments)
    labels[:, : num_shared // SEGMENT] = labels[0, : num_shared // SEGMENT]
    shape = AttentionShape(num_heads, num_kv_heads, HEAD_DIM, 1.0)
    write(words, layout, grid, shape, starts, lens, Prefixes(labels, np.arange(batch)))
    num_items = int(words[layout.num_items])
    items = words[layout.items : layout.items + num_items * ITEM_WORDS].reshape(-1, ITEM_WORDS)
    shared_units = np.repeat(items[:, 3] - items[:, 2], num_kv_heads)
    own = np.diff(words[layout.program_units : layout.program_units + num_programs + 1])
    programs = np.arange(len(shared_units)) % num_programs
    shared = np.bincount(programs, weights=shared_units, minlength=num_programs)
    tile_clocks = own * OWN_INSTRUCTIONS + shared * SHARED_INSTRUCTIONS
    clocks = SEGMENT // KEYS * tile_clocks / ISSUED
    of_processor = np.bincount(np.arange(num_programs) % H100.num_multiprocessors, weights=clocks)
    entries = words[layout.entries : layout.entries + batch * ENTRY_WORDS].reshape(-1, ENTRY_WORDS)
    num_partials = int((entries[:, 6] >= 0).sum()) * segments * num_heads
    key_bytes = 2 * num_kv_heads * HEAD_DIM * ELEMENT_BYTES
    kv_bytes = key_bytes * (batch * (context - num_shared) + num_shared)
    read_bytes = key_bytes * batch * (context - num_shared) + key_bytes / num_kv_heads * SEGMENT * shared_units.sum()
    partial_bytes = 2 * num_partials * (HEAD_DIM + 2) * 4
    # Memory feeds all programs until the one with the most work ends.
    imbalance = (own + shared).max() / (own + shared).mean()
    return DecodeEstimate(
        kv_bytes=kv_bytes,
        parts_s={
            "memory": kv_bytes / rates.memory_bytes * imbalance,
            "cache": (read_bytes + partial_bytes) / rates.cache_bytes,
            "multiprocessor": of_processor.max() / rates.clocks,
        },
        fixed_s=FIXED_S + NUM_READS * READ_S + (2 + segments / 4) * READ_S * bool(num_partials),
    )


def step_seconds(model: ShapeName, batch: int, context: int, device: DeviceName, *, is_library: bool) -> float:
    """Return the seconds of a decode step with temperature."""
    config = SHAPES[model]
    shapes, rates = weight_shapes(config), DEVICES[device]
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    seconds = {}
    for name, (n, k) in shapes.items():
        if is_library:
            num_bytes = ELEMENT_BYTES * (n * k + batch * (n + k))
            flops_s = 2.0 * batch * n * k / (LIBRARY_SHARE * rates.matrix_flops)
            seconds[name] = max(num_bytes / (DECODE_LIBRARY_SHARE * rates.memory_bytes), flops_s) + FIXED_S
        else:
            epilogue = "silu_and_mul" if name == "gate_up" else "none"
            seconds[name] = estimate_product(batch, n, k, "bfloat16", device, epilogue).seconds  # type: ignore[arg-type]
    head_s = seconds.pop("head")
    rows = [4 * shapes["qkv"][1]] * 2 + [2 * shapes["qkv"][0]]
    rows += [round(1.5 * shapes["gate_up"][0])] if is_library else []
    rows_s = sum(rows_seconds(batch * width * ELEMENT_BYTES, device) for width in rows)
    layer_s = sum(seconds.values()) + rows_s + estimate_decode(batch, context, 0, *heads, device).seconds
    outside_s = head_s + OUTSIDE_KERNELS * KERNEL_S + SAMPLING_S + batch * SAMPLED_ROW_S
    return float(config["num_hidden_layers"] * layer_s + outside_s)


def bandwidth_share(model: ShapeName, batch: int, context: int, device: DeviceName, *, is_library: bool) -> float:
    """Return the fraction of the bandwidth that a decode step uses for weights, keys and values."""
    config = SHAPES[model]
    shapes = weight_shapes(config)
    head_weights = shapes["head"][0] * shapes["head"][1]
    layer_weights = sum(n * k for n, k in shapes.values()) - head_weights
    kv = 2 * batch * context * config["num_key_value_heads"] * HEAD_DIM
    num_bytes = ELEMENT_BYTES * (config["num_hidden_layers"] * (layer_weights + kv) + head_weights)
    spent_s = step_seconds(model, batch, context, device, is_library=is_library)
    return float(num_bytes / DEVICES[device].memory_bytes / spent_s)


def prefill_seconds(model: ShapeName, num_tokens: int, device: DeviceName, *, is_library: bool) -> float:
    """Return the seconds of a prompt of this length, in steps of 8,192 tokens at the rate of a prompt of 2,048."""
    config, shapes = SHAPES[model], weight_shapes(SHAPES[model])
    weights = config["num_hidden_layers"] * sum(n * k for name, (n, k) in shapes.items() if name != "head")
    share = prefill_share(model, 2048, device, is_library=is_library)
    return float(2.0 * num_tokens * weights / DEVICES[device].matrix_flops / share)


def uniform_workload_rate(model: ShapeName, device: DeviceName, *, is_library: bool) -> float:
    """Return output tokens per second of 256 requests with 100 to 1,024 tokens in and as many out, all at once."""
    prompt, stride = 562, 33
    spent_s, num_outputs = prefill_seconds(model, 256 * prompt, device, is_library=is_library), 0.0
    for step in range(0, 1024, stride):
        alive = max(1, round(256 * min(1.0, (1024 - step) / 924)))
        spent_s += stride * step_seconds(model, alive, prompt + step, device, is_library=is_library)
        num_outputs += stride * alive
    return num_outputs / spent_s


def full_batch_seconds(model: ShapeName, device: DeviceName, *, is_library: bool) -> float:
    """Return the seconds of 256 requests with 1,024 input and 1,024 output tokens."""
    spent_s = prefill_seconds(model, 256 * 1024, device, is_library=is_library)
    for step in range(0, 1024, 64):
        spent_s += 64 * step_seconds(model, 256, 1024 + step + 32, device, is_library=is_library)
    return spent_s


def table(device: DeviceName) -> str:
    """Return the estimates of attention as a table in Markdown, for the heads of Llama-3.1-8B."""
    lines = ["| requests x keys | time | share of the bandwidth | memory | cache | multiprocessor |"]
    lines.append("| --- " * 6 + "|")
    for batch, context, shared in CASES:
        found = estimate_decode(batch, context, shared, 32, 8, device)
        title = f"{batch} x {context:,}" + (f", of which {shared:,} shared" if shared else "")
        share = found.kv_bytes / DEVICES[device].memory_bytes / found.seconds
        parts = " | ".join(f"{1e6 * part:,.0f} µs" for part in found.parts_s.values())
        lines.append(f"| {title} | {1e6 * found.seconds:,.0f} µs | {share:.0%} | {parts} |")
    return "\n".join(lines)


def goals(device: DeviceName) -> str:
    """Return the estimates for the goals of complete models, with cuBLAS and with our own products."""
    lines = []
    for title, text in (
        (
            "decode of Llama-3.1-8B, 64 x 1 k, share of the bandwidth",
            [f"{bandwidth_share('Llama-3.1-8B', 64, 1024, device, is_library=each):.0%}" for each in (True, False)],
        ),
        (
            "nano-vllm's workload, Qwen3-0.6B, output tokens per second",
            [f"{uniform_workload_rate('Qwen3-0.6B', device, is_library=each):,.0f}" for each in (True, False)],
        ),
        (
            "Qwen3-8B, 256 x (1,024 in, 1,024 out)",
            [f"{full_batch_seconds('Qwen3-8B', device, is_library=each):.1f} s" for each in (True, False)],
        ),
    ):
        lines.append(f"{title}: {'; '.join(text)}")
    return "\n".join(lines)


def main() -> None:
    """Print the tables for each device."""
    for device in DEVICES:
        print(f"\n{device}\n\n{table(device)}\n\n{goals(device)}")


if __name__ == "__main__":
    main()
