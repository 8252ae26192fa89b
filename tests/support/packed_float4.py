"""Layers of NVFP4 and MXFP4 as compressed-tensors packs them, with scales of the published formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of e2m1."""
Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def float4(form: str, group_size: int, skipped: str) -> tuple[dict[str, Any], Quantize]:
    """Return `quantization_config`, and a function from a layer's weight to its packed tensors and their values.

    Args:
        form: nvfp4-pack-quantized or mxfp4-pack-quantized.
        group_size: number of inputs that share a scale.
        skipped: name of a layer that is not quantized.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    is_nvidia = form.startswith("nvfp4")
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group" if is_nvidia else "group",
        group_size=group_size,
        scale_dtype=torch.float8_e4m3fn if is_nvidia else torch.uint8,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=[skipped], format=form, quantization_status="compressed"
    )
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantize(layer: str, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight_OI.unflatten(1, (-1, group_size)).abs().amax(2)
        state = {"weight": weight_OI}
        if is_nvidia:
            factor = 448 * 6 / weight_OI.abs().max()
            scale = (largest / 6 * factor).to(torch.float8_e4m3fn).float()
            exact = scale / factor
            state["weight_global_scale"] = factor.view(1)
        else:
            exact = scale = 2.0 ** (largest.log2().floor() - 2)
        parts = compressor.compress({**state, "weight_scale": scale}, scheme)
        of_inputs = exact.repeat_interleave(group_size, 1)
        nearest = ((weight_OI / of_inputs).clamp(-6, 6).abs().unsqueeze(2) - NUMBERS).abs().argmin(2)
        packed = parts["weight_packed"]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        assert ((codes & 7) == nearest).float().mean() > 0.95, "but for ties, the nearest numbers"
        values = NUMBERS[codes & 7] * (1.0 - 2.0 * (codes >> 3)) * of_inputs
        return {part: value for part, value in parts.items() if value is not None}, values

    return config.to_dict(), quantize
