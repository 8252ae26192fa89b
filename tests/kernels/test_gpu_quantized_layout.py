"""Which types hold the scales of quantized weights on GPUs."""

from dataclasses import replace

import pytest
import torch
from quantized_weights import FORMATS, weight_of

from octavo.kernels.linear.gpu_quantized_layout import pack
from octavo.kernels.linear.quantized import QuantizedWeight


def scale_type(weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.dtype | None:
    """Return the type of the scales; None: the weight must be dequantized."""
    packed = pack(weight, dtype, torch.device("cpu"), has_float8=True)
    return None if packed is None else packed.scale_dtype


def with_numbers(name: str, *, scale: float = 0.01, minimum: float = -0.01) -> QuantizedWeight:
    """Return a weight of a format with float32 scales, one of which is `scale`, and the same for minimums."""
    weight = weight_of(0, **FORMATS[name][0], shape=(128, 256))
    scales = weight.scale_OG.half().float()
    scales[3, 2] = scale
    if weight.minimum_OG is None:
        return replace(weight, scale_OG=scales)
    minimums = weight.minimum_OG.half().float()
    minimums[3, 2] = minimum
    return replace(weight, scale_OG=scales, minimum_OG=minimums)


@pytest.mark.parametrize("name", ["Q6_K", "Q5_K"])
def test_scales_of_float32_are_rounded_by_2_to_the_minus_11_at_most(name: str) -> None:
    assert scale_type(with_numbers(name)) == torch.float16
    assert scale_type(with_numbers(name, scale=0.0)) == torch.float16
    assert scale_type(with_numbers(name, scale=3 * 2.0**-24)) == torch.float16, "exact, though subnormal"
    assert scale_type(with_numbers(name, scale=2.5 * 2.0**-24)) is None
    assert scale_type(with_numbers(name, scale=30000.0 * 127)) is None


def test_powers_of_two_stay_exact_in_bfloat16() -> None:
    weight = with_numbers("Q8_0")
    powers = 2.0 ** torch.arange(-60, -60 + weight.scale_OG.numel()).clamp(max=60).view_as(weight.scale_OG).float()
    assert scale_type(replace(weight, scale_OG=powers)) == torch.bfloat16
    assert scale_type(replace(weight, scale_OG=torch.zeros_like(powers))) == torch.float16


@pytest.mark.parametrize("name", ["Q5_K", "Q4_K"])
def test_minimums_beyond_float16_become_no_infinity(name: str) -> None:
    assert scale_type(with_numbers(name, minimum=-30000.0 * 63), torch.float16) is None
