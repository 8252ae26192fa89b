"""Rotary angles from a model's configuration, in every spelling and with every supported scaling.

Rotates nothing; `octavo.kernels.rope` does.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import optional, required

_CHUNK_POSITIONS = 1024
"""Angles are computed in fixed chunks of this many positions, so that the angle of a position has the same bits
however long the table is."""


class Rotary:
    """Cosines and sines by position, computed once for all positions of the longest request."""

    def __init__(self, inverse_frequencies_C: Tensor, magnitude: float = 1.0) -> None:
        self._inverse_frequencies_C = inverse_frequencies_C
        self._magnitude = magnitude
        self._cos_LC = torch.empty(0, len(inverse_frequencies_C))
        self._sin_LC = torch.empty(0, len(inverse_frequencies_C))

    def prepare(self, num_positions: int, device: torch.device) -> None:
        """Compute the angles of positions below `num_positions`, unless they exist.

        They are computed on the CPU for every device, so that all devices have the same bits.
        """
        if num_positions <= len(self._cos_LC):
            return
        cos, sin = [self._cos_LC], [self._sin_LC]
        for start in range(len(self._cos_LC), num_positions, _CHUNK_POSITIONS):
            positions_L = torch.arange(start, start + _CHUNK_POSITIONS, dtype=torch.float32)
            angles_LC = positions_L.unsqueeze(1) * self._inverse_frequencies_C
            cos.append(angles_LC.cos() * self._magnitude)
            sin.append(angles_LC.sin() * self._magnitude)
        self._cos_LC = torch.cat([part_LC.to(device) for part_LC in cos])
        self._sin_LC = torch.cat([part_LC.to(device) for part_LC in sin])

    def lookups(self, positions_T: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the look-ups of cos_TC and sin_TC, for `octavo.kernels.embedding.embeddings`.

        They are in float32, multiplied by the magnitude of the scaling.
        """
        return (positions_T, self._cos_LC), (positions_T, self._sin_LC)


def rotary_from_config(config: Mapping[str, Any], head_dim: int, *, default_theta: float = 10000.0) -> Rotary:
    """Make the angles that `config.json` describes.

    The scaling is under `rope_parameters` (transformers 5) or `rope_scaling`; the base is there too, or beside it as
    `rope_theta`.

    Raises:
        ConfigError: a scaling that is not supported, or one whose values are missing.
    """
    rope = {"rope_theta": optional(config, "rope_theta", default_theta)}
    for key in ("rope_scaling", "rope_parameters"):
        rope |= optional(config, key, {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError("config.json: rope parameters that differ between layers are not supported")
    for source in (rope, config):
        if optional(source, "partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("config.json: a partial_rotary_factor other than 1 is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _SCALINGS:
        raise ConfigError(
            f"config.json: the rope scaling {kind!r} is not supported",
            hint=f"supported: {', '.join(sorted(_SCALINGS))}",
        )
    exponents_C = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse_frequencies_C = 1.0 / required(rope, "rope_theta", float) ** exponents_C
    return _SCALINGS[kind](inverse_frequencies_C, rope, config)


def _default(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    return Rotary(inverse_frequencies_C)


def _linear(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    """Positions divided by a factor."""
    return Rotary(inverse_frequencies_C / required(rope, "factor", float))


def _llama3(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    """Llama 3.1: long wavelengths are divided by a factor, short ones kept, the ones between interpolated."""
    factor = required(rope, "factor", float)
    low, high = required(rope, "low_freq_factor", float), required(rope, "high_freq_factor", float)
    original = required(rope, "original_max_position_embeddings", int)
    turns_C = original * inverse_frequencies_C / (2 * math.pi)
    kept_share_C = ((turns_C - low) / (high - low)).clamp(0.0, 1.0)
    return Rotary(inverse_frequencies_C * (kept_share_C + (1.0 - kept_share_C) / factor))


def _yarn(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    """YaRN (arXiv 2309.00071): interpolated by the number of rotations within the original length; scores scaled."""
    num_pairs = len(inverse_frequencies_C)
    theta = required(rope, "rope_theta", float)
    original = optional(rope, "original_max_position_embeddings", required(config, "max_position_embeddings", int))
    factor = required(rope, "factor", float)

    def pair_with_turns(turns: float) -> float:
        return num_pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = pair_with_turns(optional(rope, "beta_fast", 32.0))
    last = pair_with_turns(optional(rope, "beta_slow", 1.0))
    if optional(rope, "truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first if last != first else 0.001
    divided_share_C = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    frequencies_C = inverse_frequencies_C * (1.0 - divided_share_C + divided_share_C / factor)
    return Rotary(frequencies_C, _yarn_magnitude(rope, factor))


def _yarn_magnitude(rope: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = optional(rope, "mscale", 0.0), optional(rope, "mscale_all_dim", 0.0)
    implied = magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
    return optional(rope, "attention_factor", implied)


_SCALINGS: dict[str, Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Rotary]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Not supported: "dynamic", whose angles depend on the length of the sequence, not only on the position."""
