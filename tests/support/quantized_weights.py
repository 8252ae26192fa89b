"""Random quantized weights in all forms that checkpoints have."""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight

FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"bits": 4, "group_size": 32, "zero": True, "has_order": True}, "u4"),
    "awq": ({"bits": 4, "group_size": 128, "zero": True}, "u4"),
    "int4 of groups": ({"bits": 4, "group_size": 64, "offset": 8}, "u4"),
    "int4 of outputs": ({"bits": 4, "group_size": 0, "offset": 8, "scale_dtype": torch.float32}, "u4"),
    "int4 of outputs with zeros": ({"bits": 4, "group_size": 0, "zero": True}, "u4"),
    "Q4_K": ({"bits": 4, "group_size": 32, "minimum": True}, "u4"),
    "Q8_0": ({"bits": 8, "group_size": 32, "offset": 128}, "u8"),
    "Q6_K": ({"bits": 8, "group_size": 16, "offset": 32}, "u8"),
    "gptq of 8 bits": ({"bits": 8, "group_size": 128, "zero": True}, "u8"),
    "Q5_K": ({"bits": 8, "group_size": 32, "minimum": True}, "u8"),
    "int8 of outputs": ({"bits": 8, "group_size": 0, "offset": 128, "scale_dtype": torch.bfloat16}, "u8"),
    "mxfp4": ({"bits": 4, "group_size": 32, "codebook": "e2m1"}, "e2m1"),
    "fp8 of outputs": ({"bits": 8, "group_size": 0, "codebook": "e4m3", "scale_dtype": torch.float32}, "e4m3"),
    "fp8 of blocks": ({"bits": 8, "group_size": 128, "codebook": "e4m3", "scale_dtype": torch.float32}, "e4m3"),
}
"""Arguments of `weight_of`, and the kind that GPUs repack it to for 16-bit inputs."""
ROW_FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "w8a8": (FORMATS["int8 of outputs"][0], "int8_token", "s8"),
    "w8a8, static": (FORMATS["int8 of outputs"][0], "int8_tensor", "s8"),
    "fp8": (FORMATS["fp8 of outputs"][0], "fp8_token", "f8"),
    "fp8, static": (FORMATS["fp8 of outputs"][0], "fp8_tensor", "f8"),
    "fp8 of blocks": (FORMATS["fp8 of blocks"][0], "fp8_token", "f8"),
}
"""The same for 8-bit inputs, with their type."""


def weight_of(
    seed: int,
    *,
    bits: int,
    group_size: int,
    offset: int = 0,
    zero: bool = False,
    minimum: bool = False,
    codebook: Any = None,
    scale_dtype: torch.dtype = torch.float16,
    has_order: bool = False,
    shape: tuple[int, int],
) -> QuantizedWeight:
    """Return a weight of a shape, outputs by inputs. `group_size`: 0: one scale per output."""
    group_size = group_size or shape[1]
    noise = torch.Generator().manual_seed(seed)
    groups = shape[0], -(-shape[1] // group_size)

    def integers(*sizes: int, end: int = 2**bits) -> Tensor:
        return torch.randint(0, end, sizes, generator=noise, dtype=torch.uint8)

    levels = integers(*shape)
    if codebook == "e4m3":
        levels[(levels & 0x7F) == 0x7F] = 0x80  # NaN
    scale = torch.rand(groups, generator=noise) * 0.02 + 0.001
    if codebook == "e2m1":
        scale = 2.0 ** torch.randint(-8, -2, groups, generator=noise)
    return QuantizedWeight(
        levels_OI=levels,
        scale_OG=scale.to(scale_dtype),
        minimum_OG=-torch.rand(groups, generator=noise).to(scale_dtype) if minimum else None,
        offset=offset,
        bits=bits,
        group_size=group_size,
        zero_OG=integers(*groups) if zero else None,
        codebook=codebook,
        order_I=torch.randperm(shape[1], generator=noise) if has_order else None,
    )
