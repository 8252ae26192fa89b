"""The products with quantized weights that are compiled ahead of time, in the shapes of Llama-3.1-8B. See
`kernel_launches`."""

from collections.abc import Callable

import torch
import triton
from bench_gpu_parts.quantized import FORMATS, QuantizedName
from bench_gpu_parts.quantized_layers import weight_of
from torch import Tensor

from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_tiles import H100, Gpu

META = torch.device("meta")
GPUS = {
    80: Gpu(108, 163 << 10, has_descriptors=False),
    89: Gpu(142, 99 << 10, has_descriptors=False),
    90: H100,
}
NUM_INPUTS = NUM_OUTPUTS = 4096
ROWS = (16, 8192)


def multiply(name: QuantizedName, num_rows: int) -> Callable[[], object]:
    """Return a launch that multiplies rows with a weight."""

    def launch() -> Tensor:
        architecture = triton.runtime.driver.active.get_current_target().arch
        weight = weight_of(name, NUM_OUTPUTS, NUM_INPUTS, META)
        num_done = torch.empty(132, dtype=torch.int32, device=META)
        rows = torch.empty(num_rows, NUM_INPUTS, dtype=torch.bfloat16, device=META)
        return QuantizedProduct(weight, None, GPUS[architecture], num_done)(rows)

    return launch


LAUNCHES = {
    f"quantized_linear, {name}, {num_rows} rows": multiply(name, num_rows) for name in FORMATS for num_rows in ROWS
}
ONLY_ON = {
    f"quantized_linear, {name}, {num_rows} rows": (89, 90) if form.kind == "f8" else (80, 89, 90)
    for name, form in FORMATS.items()
    for num_rows in ROWS
}
"""An Ampere multiplies no float8; for Blackwell for data centres there are no kernels."""
