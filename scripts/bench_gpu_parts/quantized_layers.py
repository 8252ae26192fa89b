"""The products of a layer with quantized weights: random ones, and their time."""

import torch
from torch import Tensor

from bench_gpu_parts.quantized import FORMATS, LAYER, MODEL, QuantizedName
from bench_gpu_parts.shapes import SHAPES, weight_shapes
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of
from octavo.kernels.linear.gpu_product import gpu_of
from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS, GpuQuantizedWeight, chunks_of, units_of

LEAST_S = 0.05
"""Minimum time of one measurement in seconds."""
_WORD_TYPES = {"s8": torch.int8, "f8": torch.float8_e4m3fn}


def weight_of(name: QuantizedName, num_outputs: int, num_inputs: int, device: torch.device) -> GpuQuantizedWeight:
    """Return a weight with random codes and scales of 2^-7, or without contents on "meta"."""
    form = FORMATS[name]
    kind, group_size = form.kind, form.group_size
    chunk, num_chunks = chunks_of(kind, group_size)
    num_tiles, num_blocks = -(-num_outputs // TILE_OUTPUTS), -(-num_inputs // (chunk * num_chunks))
    words = (num_tiles, num_blocks, TILE_OUTPUTS, chunk)
    scale_dtype: torch.dtype = getattr(torch, form.scale_type)
    span = int(group_size * 4 / form.scale_bytes)
    scales = (-(-num_blocks * chunk * num_chunks // span) if group_size else 1, num_tiles * TILE_OUTPUTS)
    unit, sum_unit = units_of(kind, torch.bfloat16, group_size)
    filled = torch.tensor([2.0**-7] * (4 // scale_dtype.itemsize), dtype=scale_dtype, device=device).view(torch.int32)
    word_type = _WORD_TYPES.get(kind, torch.int16)
    if device.type == "meta":
        codes = torch.empty(words, dtype=word_type, device=device)
    else:
        num_bytes = (*words[:3], chunk * word_type.itemsize)
        # Without the float8 codes that are NaN.
        codes = torch.randint(0, 120 if kind == "f8" else 256, num_bytes, dtype=torch.uint8, device=device)
        codes = codes.view(word_type)
    return GpuQuantizedWeight(
        kind=kind,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        dtype=torch.bfloat16,
        words=codes,
        scales=filled.expand(scales).contiguous(),
        scale_dtype=scale_dtype,
        group_size=group_size,
        other=form.other,
        zero=0 if form.other == "shift" else 128 if form.code_bits == 8 else 8,
        unit=unit,
        sum_unit=sum_unit,
        chunk=chunk,
        num_chunks=num_chunks,
        order_I=None,
        row_scale=None,
        row_scaling="range",
    )


def product_of(name: QuantizedName, num_outputs: int, num_inputs: int) -> QuantizedProduct:
    """Return the product with such a weight, without a bias."""
    gpu = gpu_of(DEVICE)
    num_done = torch.zeros(gpu.num_multiprocessors, dtype=torch.int32, device=DEVICE)
    return QuantizedProduct(weight_of(name, num_outputs, num_inputs, DEVICE), None, gpu, num_done)


class Layer:
    """The products of a layer of the model, in several copies, which together are larger than the cache."""

    def __init__(self, name: QuantizedName) -> None:
        shapes = weight_shapes(SHAPES[MODEL])
        self.shapes = [shapes[part] for part in LAYER] if IS_ON_GPU else [(128, 128)]
        num_bytes = sum(FORMATS[name].weight_bytes(*shape) for shape in self.shapes)
        self.copies = [[product_of(name, *shape) for shape in self.shapes] for _ in range(num_copies(int(num_bytes)))]

    def rows(self, num_rows: int) -> list[Tensor]:
        """Return the inputs of each product."""
        return [normal(num_rows, num_inputs) for _, num_inputs in self.shapes]

    def seconds(self, num_rows: int) -> float:
        """Return the time of each product once, in seconds, added up."""
        rows = self.rows(num_rows)

        def run(copy: int) -> Tensor:
            return [product(x) for product, x in zip(self.copies[copy], rows, strict=True)][-1]

        return seconds_of(captured(run, len(self.copies)), LEAST_S) / len(self.copies)


@torch.inference_mode()
def quantized_layer(name: QuantizedName, rows: list[int]) -> list[float]:
    """Return the seconds of a layer's products for each number of rows."""
    layer = Layer(name)
    found = [layer.seconds(num_rows) for num_rows in rows]
    del layer
    release_memory()
    return found
