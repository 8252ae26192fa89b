"""Products with quantized weights: their speed compared with the estimate, and whether bits of a row stay the same."""

from typing import Any

import torch
from bench_gpu_parts.quantized import FORMATS, QuantizedName
from bench_gpu_parts.quantized_layers import Layer
from bench_gpu_parts.timing import IS_ON_GPU, release_memory
from gpu_quantized_estimates import estimate_layer

from first_look_parts.figures import cell_result, figure


@torch.inference_mode()
def quantized(name: QuantizedName, rows: list[int]) -> dict[str, Any]:
    """Return the microseconds of a layer's products for each number of rows, and the batches whose bits differ."""
    layer = Layer(name)
    inputs = layer.rows(max(rows))
    whole = [product(x) for product, x in zip(layer.copies[0], inputs, strict=True)]
    differing = [
        num_rows
        for num_rows in rows
        if any(
            not torch.equal(product(x[:num_rows]), out[:num_rows])
            for product, x, out in zip(layer.copies[0], inputs, whole, strict=True)
        )
    ]
    figures = []
    for num_rows in rows:
        key, title = f"quantized-{name}-{num_rows}", f"products of a layer, {name}, {num_rows} rows"
        if IS_ON_GPU:
            figures.append(figure(key, title, "us", 1e6 * estimate_layer(name, num_rows, "H200")[0], column="estimate"))
        spent_s = layer.seconds(num_rows)
        bound = [
            (FORMATS[name].weight_bytes(*shape) + 2 * num_rows * sum(shape), 2.0 * num_rows * shape[0] * shape[1])
            for shape in layer.shapes
        ]
        figures.append(figure(key, title, "us", 1e6 * spent_s, seconds=spent_s, bound=bound))
    title = f"products, {name}: batches whose rows have other bits, of {len(rows)}"
    figures.append(figure(f"bits-quantized-{name}", title, "", len(differing), digits=0))
    lines = [f"BITS DIFFER, products with {name}: in batches of {differing}"] if differing else []
    del layer
    release_memory()
    return cell_result(figures, differing, lines)
