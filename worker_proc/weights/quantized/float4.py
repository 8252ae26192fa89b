"""Matrices of 4-bit floats (e2m1), two in a byte with the first one in the low half: NVFP4 and MXFP4."""

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix


def float_scale(scale: Tensor) -> Tensor:
    """Return scales as floats: bytes are exponents of e8m0."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def float4_matrix(
    layer: str,
    packed: Tensor,
    scale_OG: Tensor,
    *,
    divisor: Tensor | None = None,
    factor: Tensor | None = None,
) -> StoredMatrix:
    """Return a matrix of 4-bit floats.

    Args:
        layer: name of the layer.
        packed: uint8 (outputs, inputs / 2).
        scale_OG: floats, or exponents in uint8.
        divisor: divisor of all scales, one number (compressed-tensors' NVFP4).
        factor: factor of all scales, one number (ModelOpt's NVFP4).

    Raises:
        ConfigError: the tensors do not fit one another.
    """
    if packed.dtype != torch.uint8 or packed.ndim != 2 or scale_OG.ndim != 2 or len(scale_OG) != len(packed):
        raise ConfigError(
            f"{layer!r} holds 4-bit floats of type {packed.dtype} and shape {tuple(packed.shape)} with scales of shape "
            f"{tuple(scale_OG.shape)}; expected bytes, and scales of groups for each output"
        )
    num_outputs, num_inputs = packed.shape[0], packed.shape[1] * 2
    group_size = num_inputs // scale_OG.shape[1]

    def decode() -> QuantizedWeight:
        codes_OI = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        scales = float_scale(scale_OG).float()
        if divisor is not None:
            scales = scales / divisor.float()
        elif factor is not None:
            scales = scales * factor.float()
        return QuantizedWeight(codes_OI, scales, None, 0, 4, group_size, codebook="e2m1")

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)
