"""Converts the rotary scaling of a GGUF file to `rope_scaling` of `config.json`."""

import math
from typing import Any

from octavo.frontend.model_files.gguf.metadata import GgufMetadata
from octavo.protocol.errors import ConfigError

FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors with divisors of the rotary frequencies. The original checkpoint has no such tensors."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""Parameters of Llama 3's rotary scaling, the same in every published checkpoint."""


def rope_scaling(gguf: GgufMetadata, theta: float, num_rotated: int) -> dict[str, Any] | None:
    """Return `rope_scaling`. `None` if the frequencies are not scaled.

    Args:
        gguf: the file.
        theta: base of the frequencies.
        num_rotated: number of rotated dimensions of a head.

    Raises:
        ConfigError: the scaling is not supported, or its factors do not belong to a known scaling.
    """
    kind = gguf.get("rope.scaling.type", "none")
    if LONG_FACTORS in gguf.rope_factors:
        return _longrope(gguf)
    if FACTORS in gguf.rope_factors:
        return _llama3(gguf.rope_factors[FACTORS], theta, num_rotated)
    if kind == "none":
        return None
    factor = gguf.required("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(gguf, factor)
    raise ConfigError(f"rotary scaling of type {kind!r} is not supported")


def _yarn(gguf: GgufMetadata, factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": gguf.required("rope.scaling.original_context_length"),
        "beta_fast": gguf.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": gguf.number("rope.scaling.yarn_beta_slow"),
    } | _magnitude(gguf, 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0)
    # DeepSeek: 0.1 times `mscale_all_dim`, which equals `mscale` in every published configuration.
    if (multiplier := gguf.number("rope.scaling.yarn_log_multiplier")) is not None:
        scaling["mscale"] = scaling["mscale_all_dim"] = float(f"{multiplier / 0.1:.6g}")
    return {key: value for key, value in scaling.items() if value is not None}


def _longrope(gguf: GgufMetadata) -> dict[str, Any]:
    original = gguf.required("rope.scaling.original_context_length")
    scaling = {
        "rope_type": "longrope",
        "long_factor": gguf.rope_factors[LONG_FACTORS],
        "short_factor": gguf.rope_factors[SHORT_FACTORS],
        "original_max_position_embeddings": original,
    }
    stretch = gguf.required("context_length") / original
    implied = math.sqrt(1.0 + math.log(stretch) / math.log(original)) if stretch > 1.0 else 1.0
    return scaling | _magnitude(gguf, implied)


def _magnitude(gguf: GgufMetadata, implied: float) -> dict[str, Any]:
    """Return the factor of cosines and sines, unless it is the implied one, which the file stores in float32 only."""
    stored = gguf.number("rope.scaling.attn_factor", implied)
    return {} if math.isclose(stored, implied, rel_tol=1e-5) else {"attention_factor": stored}


def _llama3(factors: list[float], theta: float, num_rotated: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling; the file stores the frequency divisors themselves."""
    factor = float(round(max(factors), 4))
    expected = _llama3_factors(factor, theta, num_rotated)
    if len(factors) != len(expected) or not all(
        math.isclose(one, other, rel_tol=1e-3) for one, other in zip(factors, expected, strict=True)
    ):
        raise ConfigError(
            "the file has rotary frequency factors (rope_freqs.weight) that are not Llama 3's",
            hint="use the model's safetensors files",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(factor: float, theta: float, num_rotated: int) -> list[float]:
    """Return the divisors: `factor` for long wavelengths, 1 for short ones, interpolated between."""
    divisors = []
    for index in range(num_rotated // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / num_rotated)
        turns = _LLAMA3_CONTEXT / wavelength
        blend = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors
