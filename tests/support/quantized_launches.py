"""The products with quantized weights that are compiled ahead of time, in the shapes of Llama-3.1-8B. See
`kernel_launches`."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS, GpuQuantizedWeight, Kind, Other, chunks_of
from octavo.kernels.linear.gpu_tiles import H100, Gpu

GPUS = {
    80: Gpu(108, 163 << 10, has_descriptors=False),
    89: Gpu(142, 99 << 10, has_descriptors=False),
    90: H100,
}
NUM_INPUTS = NUM_OUTPUTS = 4096
WORD_TYPES = {"s8": torch.int8, "f8": torch.float8_e4m3fn}
FORMATS: dict[str, tuple[Kind, int, Other, torch.dtype]] = {
    "GPTQ": ("u4", 128, "shift", torch.bfloat16),
    "Q4_K": ("u4", 32, "minimum", torch.bfloat16),
    "mxfp4": ("e2m1", 32, "none", torch.bfloat16),
    "Q8_0": ("u8", 32, "none", torch.float16),
    "w8a16": ("u8", 0, "none", torch.float32),
    "block fp8 of Ampere": ("e4m3", 128, "none", torch.float32),
    "w8a8": ("s8", 0, "none", torch.float32),
    "block fp8": ("f8", 128, "none", torch.float32),
    "fp8": ("f8", 0, "none", torch.float32),
}
"""Kind, group size, what a group has beside its scale, and the type of scales; see `gpu_quantized_layout`."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def weight_of(name: str, num_outputs: int = NUM_OUTPUTS, num_inputs: int = NUM_INPUTS) -> GpuQuantizedWeight:
    """Return a weight without data; whole tiles and blocks."""
    kind, group_size, other, scale_dtype = FORMATS[name]
    chunk, num_chunks = chunks_of(kind, group_size)
    words = (num_outputs // TILE_OUTPUTS, num_inputs // (chunk * num_chunks), TILE_OUTPUTS, chunk)
    halves = 1 if other != "none" or scale_dtype == torch.float32 else 2
    scales = (num_inputs // (group_size * halves) if group_size else 1, num_outputs)
    return GpuQuantizedWeight(
        kind=kind,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        dtype=torch.bfloat16,
        words=empty(*words, dtype=WORD_TYPES.get(kind, torch.int16)),
        scales=empty(*scales, dtype=torch.int32),
        scale_dtype=scale_dtype,
        group_size=group_size,
        other=other,
        zero=0 if other == "shift" else 128,
        chunk=chunk,
        num_chunks=num_chunks,
        order_I=None,
        row_scale=None,
    )


def multiply(name: str, num_rows: int) -> Callable[[], object]:
    """Return a launch that multiplies rows with a weight."""

    def launch() -> Tensor:
        architecture = triton.runtime.driver.active.get_current_target().arch
        product = QuantizedProduct(weight_of(name), None, GPUS[architecture], empty(132, dtype=torch.int32))
        return product(empty(num_rows, NUM_INPUTS))

    return launch


LAUNCHES = {
    f"quantized_linear, {name}, {num_rows} rows": multiply(name, num_rows)
    for name in FORMATS
    for num_rows in ((16, 8192) if name not in ("w8a16", "fp8") else (16,))
}
ONLY_ON = {name: (89, 90) if name.split(", ")[1] in ("fp8", "block fp8") else (80, 89, 90) for name in LAUNCHES}
"""An Ampere multiplies no float8; for Blackwell for data centres there are no kernels."""
