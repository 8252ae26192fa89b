"""What mixtures of experts with quantized weights should take on a GPU, by arithmetic. Prints the
tables of docs/gpu-kernels.md.

Tokens are routed as in `gpu_expert_estimates`; blocks of inputs take as long as in `gpu_quantized_estimates`.
"""

import numpy as np
import torch
from bench_gpu_parts.mixtures import MIXTURES, Mixture
from bench_gpu_parts.quantized import FORMATS, ODD_LOOP_INSTRUCTIONS, QUANTIZED_MIXTURES, QuantizedName
from bench_gpu_parts.quantized_layers import weight_of
from gpu_estimates import DEVICES, ELEMENT_BYTES, FIXED_S, KERNEL_S, LATENCY_S, ROWS, DeviceName
from gpu_expert_estimates import EMPTY_S, LayerEstimate, around_products_s, routed
from gpu_quantized_estimates import (
    EIGHT_BIT_RATE,
    ISSUED,
    ISSUED_ALONE,
    NUM_SCHEDULERS,
    SHARING,
    block_seconds,
    end_instructions,
)

from octavo.kernels.experts.gpu_quantized import GATED_ROWS
from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS
from octavo.kernels.linear.gpu_tiles import H100

META = torch.device("meta")


def expert_bytes(mixture: Mixture, form: QuantizedName) -> float:
    """Return the bytes of one expert."""
    gates_and_ups = 2 * FORMATS[form].weight_bytes(mixture.inner, mixture.width)
    return gates_and_ups + FORMATS[form].weight_bytes(mixture.width, mixture.inner)


def estimate_layer(name: QuantizedName, mixture: Mixture, num_tokens: int, device: DeviceName) -> LayerEstimate:
    """Estimate the experts of a layer."""
    rates, form, counts = DEVICES[device], FORMATS[name], routed(mixture, num_tokens)
    num_slots, num_read = num_tokens * mixture.top_k, int((counts > 0).sum())
    around_s = around_products_s(mixture, num_tokens, rates)
    is_8_bit = form.kind in ("s8", "f8")
    quantize_s = KERNEL_S + 3 * num_slots * mixture.inner / rates.cache_bytes if is_8_bit else 0.0
    parts_s = {
        "route": around_s["route"],
        "sort": around_s["sort"],
        "gate_up": _product_s(name, counts, mixture.inner, mixture.width, device, num_weights=2),
        "down": _product_s(name, counts, mixture.width, mixture.inner, device, num_weights=1),
        "combine": around_s["combine"],
        "quantize": 2 * quantize_s,
    }
    least_bytes = num_read * expert_bytes(mixture, name) + 2 * num_tokens * mixture.width * ELEMENT_BYTES
    matrix_flops = rates.matrix_flops * (EIGHT_BIT_RATE if is_8_bit else 1.0)
    roofline_s = max(least_bytes / rates.memory_bytes, mixture.flops(num_tokens) / matrix_flops)
    return LayerEstimate(num_read, parts_s, roofline_s)


def _product_s(
    name: QuantizedName, counts: np.ndarray, outputs: int, inputs: int, device: DeviceName, *, num_weights: int
) -> float:
    """Return the seconds of a product with one weight of each expert, or with gates and ups."""
    rates, form = DEVICES[device], FORMATS[name]
    weight = weight_of(name, outputs, inputs, META)
    product = QuantizedProduct(weight, None, H100, torch.empty(0, device="meta"))
    num_slots, num_read = int(counts.sum()), int((counts > 0).sum())
    rows = _tile_rows(product, num_slots, len(counts))
    row_tiles, tiles = int((-(-counts // rows)).sum()), -(-outputs // TILE_OUTPUTS)
    items, num_warps = row_tiles * tiles, product.num_warps(rows)
    weight_bytes = num_read * num_weights * form.weight_bytes(outputs, inputs)
    rows_bytes = num_slots * inputs * (1 if form.kind in ("s8", "f8") else ELEMENT_BYTES)
    issued = ISSUED if items * num_warps >= 4 * SHARING * H100.num_multiprocessors else ISSUED_ALONE
    issued *= NUM_SCHEDULERS / num_warps * rates.clocks
    item_s = num_weights * (weight.num_blocks * _block_s(name, product, rows, issued, device))
    item_s += num_weights * end_instructions(form, num_warps) / issued
    num_programs = (min(num_slots, len(counts)) + num_slots // rows) * tiles
    parts_s = (
        (weight_bytes + rows_bytes + num_slots * outputs * ELEMENT_BYTES) / rates.memory_bytes,
        (rows_bytes * tiles + weight_bytes * row_tiles / num_read) / rates.cache_bytes,
        -(-items // H100.num_multiprocessors) * item_s,
    )
    # Dependent reads before the first rows: the tile, its slots, the address of the weight.
    empty_s = (num_programs - items) * EMPTY_S / (8 * H100.num_multiprocessors)
    return max(parts_s) + FIXED_S + 3 * LATENCY_S + empty_s


def _block_s(name: QuantizedName, product: QuantizedProduct, rows: int, issued: float, device: DeviceName) -> float:
    weight, form = product.weight, FORMATS[name]
    instructions = form.loop_instructions[product.num_warps(rows) > NUM_SCHEDULERS]
    if weight.num_blocks % 2 and product.num_warps(rows) <= NUM_SCHEDULERS:
        instructions = ODD_LOOP_INSTRUCTIONS.get(name, instructions)
    return block_seconds(form, rows, instructions / issued, weight.chunk * weight.num_chunks, DEVICES[device])


def _tile_rows(product: QuantizedProduct, num_slots: int, num_experts: int) -> int:
    """Return the rows that `octavo.kernels.experts.gpu_quantized.tile_rows` returns on Hopper."""
    sizes = [rows for rows in product.row_sizes if product.weight.kind != "s8" or rows <= GATED_ROWS]
    return next((rows for rows in sizes if rows * num_experts >= 2 * num_slots), sizes[-1])


def table(device: DeviceName) -> str:
    """Return the estimates of the layers as a table in Markdown."""
    lines = ["| layer | " + " | ".join(f"{rows:,} token{'s' * (rows > 1)}" for rows in ROWS) + " |"]
    lines.append("| --- " * (1 + len(ROWS)) + "|")
    for form, mixture in QUANTIZED_MIXTURES.items():
        estimates = [estimate_layer(form, MIXTURES[mixture], rows, device) for rows in ROWS]
        found = [f"{1e6 * each.seconds:,.0f} µs, {each.share:.0%}" for each in estimates]
        lines.append(f"| {mixture}, {form} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table of each GPU, and the kernels of each layer."""
    for device in DEVICES:
        print(f"\n{device}\n\n{table(device)}\n")
        for form, mixture in QUANTIZED_MIXTURES.items():
            for rows in ROWS:
                parts_s = estimate_layer(form, MIXTURES[mixture], rows, device).parts_s
                parts = ", ".join(f"{part} {1e6 * s:.1f}" for part, s in parts_s.items())
                print(f"{mixture}, {form}, {rows:,} tokens: {parts}")


if __name__ == "__main__":
    main()
