"""Rotary angles from a model's configuration, in every spelling and with every supported scaling.

Does not rotate; `octavo.kernels.rope` does.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.media import NUM_AXES
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.models.hf_config import ignore, optional, required

_CHUNK_POSITIONS = 1024
"""Angles are computed in chunks of this many positions, so that the angle of a position has the same bits for any
length of the table."""


class Rotary:
    """Cosines and sines by position, computed once for all positions of the longest request."""

    def __init__(self, inverse_frequencies_C: Tensor, magnitude: float = 1.0) -> None:
        self._inverse_frequencies_C = inverse_frequencies_C
        self._magnitude = magnitude
        self._cos_LC = torch.empty(0, len(inverse_frequencies_C))
        self._sin_LC = torch.empty(0, len(inverse_frequencies_C))

    @classmethod
    def of(cls, theta: float, num_pairs: int) -> "Rotary":
        """Make unscaled angles for a base."""
        return Rotary(_inverse_frequencies(theta, num_pairs))

    @property
    def num_pairs(self) -> int:
        """C: number of rotated pairs of a head."""
        return len(self._inverse_frequencies_C)

    @property
    def magnitude(self) -> float:
        """Factor of the scaling that cosines and sines are multiplied by."""
        return self._magnitude

    def _use(self, inverse_frequencies_C: Tensor) -> None:
        """Replace the frequencies; the next `prepare` recomputes all angles."""
        self._inverse_frequencies_C = inverse_frequencies_C
        self._cos_LC = self._sin_LC = torch.empty(0, len(inverse_frequencies_C))

    def prepare(self, num_positions: int, device: torch.device) -> None:
        """Compute the angles of positions below `num_positions`, unless they exist.

        They are computed on the CPU for every device, so that all devices have the same bits.
        """
        if num_positions <= len(self._cos_LC):
            return
        num_known, size = len(self._cos_LC), -(-num_positions // _CHUNK_POSITIONS) * _CHUNK_POSITIONS
        # Chunks are written in place: the tables of millions of positions must not be in memory twice.
        cos_LC, sin_LC = (torch.empty(size, self.num_pairs, device=device) for _ in range(2))
        cos_LC[:num_known], sin_LC[:num_known] = self._cos_LC, self._sin_LC
        for start in range(num_known, size, _CHUNK_POSITIONS):
            chunk = slice(start, start + _CHUNK_POSITIONS)
            positions_L = torch.arange(chunk.start, chunk.stop, dtype=torch.float32)
            angles_LC = positions_L.unsqueeze(1) * self._inverse_frequencies_C
            cos_LC[chunk] = angles_LC.cos() * self._magnitude
            sin_LC[chunk] = angles_LC.sin() * self._magnitude
        self._cos_LC, self._sin_LC = cos_LC, sin_LC

    def angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos_TC and sin_TC of positions for which `prepare` was called."""
        return self._cos_LC[positions_T], self._sin_LC[positions_T]

    def lookups(self, positions_T: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return indices and tables of cos_TC and sin_TC, for `octavo.kernels.embedding.embeddings`.

        The tables are float32, multiplied by the magnitude of the scaling.
        """
        return (positions_T, self._cos_LC), (positions_T, self._sin_LC)


class LongRotary(Rotary):
    """LongRoPE (arXiv 2402.13753): other frequencies if requests may exceed the original length.

    `transformers` chooses by the current length of each sequence, and keeps keys that were computed with the other
    frequencies. Here, as in vLLM, the length limit of the engine decides: a position must have one angle.
    """

    def __init__(self, short_C: Tensor, long_C: Tensor, original_positions: int, magnitude: float) -> None:
        super().__init__(short_C, magnitude)
        self._short_C, self._long_C = short_C, long_C
        self._original_positions = original_positions

    def prepare(self, num_positions: int, device: torch.device) -> None:
        """See `Rotary.prepare`."""
        frequencies_C = self._short_C if num_positions <= self._original_positions else self._long_C
        if frequencies_C is not self._inverse_frequencies_C:
            self._use(frequencies_C)
        super().prepare(num_positions, device)


class DynamicRotary(Rotary):
    """Dynamic NTK scaling: a larger base if requests may exceed the original length, as in `LongRotary`."""

    def __init__(self, theta: float, num_pairs: int, factor: float, original_positions: int) -> None:
        super().__init__(_inverse_frequencies(theta, num_pairs))
        self._theta, self._num_pairs = theta, num_pairs
        self._factor, self._original_positions = factor, original_positions
        self._planned_positions = original_positions

    def prepare(self, num_positions: int, device: torch.device) -> None:
        """See `Rotary.prepare`."""
        planned = max(num_positions, self._original_positions)
        if planned != self._planned_positions:
            stretch = self._factor * planned / self._original_positions - (self._factor - 1.0)
            theta = self._theta * stretch ** (self._num_pairs / (self._num_pairs - 1.0))
            self._use(_inverse_frequencies(theta, self._num_pairs))
            self._planned_positions = planned
        super().prepare(num_positions, device)


class AxisRotary(Rotary):
    """M-RoPE: each pair of a head rotates by the position on one of several axes.

    A step that may have such positions reads tables that were filled with the angles of its rows. Otherwise all axes
    are equal, and angles are looked up by position as in other models.

    Args:
        inverse_frequencies_C: inverse frequencies of the pairs.
        magnitude: factor of the scaling.
        axes_C: axis of each pair.
    """

    def __init__(self, inverse_frequencies_C: Tensor, magnitude: float, axes_C: Tensor) -> None:
        super().__init__(inverse_frequencies_C, magnitude)
        self._axes_C = axes_C
        self._pairs_C = torch.arange(len(axes_C))
        self._step_tables: tuple[Tensor, Tensor] | None = None

    def take_steps(self, max_rows: int, device: torch.device) -> None:
        """Allocate tables for the angles of steps of up to `max_rows` rows. Call before a step is recorded."""
        cos_XC, sin_XC = torch.zeros(2, max_rows, self.num_pairs, device=device)
        self._step_tables = cos_XC, sin_XC
        self._axes_C, self._pairs_C = self._axes_C.to(device), self._pairs_C.to(device)

    def put(self, axes_AT: npt.NDArray[np.int64], stream: Stream | None = None) -> None:
        """See `octavo.worker_proc.models.base.StepAngles`."""
        assert self._step_tables is not None, "take_steps() comes before"
        # Video frames may be further apart than the tokens of the longest request.
        self.prepare(int(axes_AT.max()) + 1, self._cos_LC.device)
        axes = torch.from_numpy(axes_AT) if stream is None else upload_array(stream, axes_AT)
        positions_TC = axes.T[:, self._axes_C]
        for table_XC, angles_LC in zip(self._step_tables, (self._cos_LC, self._sin_LC), strict=True):
            table_XC[: len(positions_TC)] = angles_LC[positions_TC, self._pairs_C]

    def lookups(self, positions_T: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """See `Rotary.lookups`. If tables are filled for each step, `positions_T` counts the rows of the step."""
        if self._step_tables is None:
            return super().lookups(positions_T)
        cos_XC, sin_XC = self._step_tables
        return (positions_T, cos_XC), (positions_T, sin_XC)


def rotary_from_config(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    default_theta: float = 10000.0,
    default_partial: float = 1.0,
    layer_type: str | None = None,
) -> Rotary:
    """Make the angles that `config.json` describes.

    The scaling is under `rope_parameters` (transformers 5) or `rope_scaling`. The base is there too, or at top level as
    `rope_theta`.

    Args:
        config: model configuration.
        head_dim: size of a head.
        default_theta: base if the configuration has none.
        default_partial: rotated share of a head if the configuration has none.
        layer_type: type of layer that the angles are for, if `rope_parameters` has one entry per type.

    Raises:
        ConfigError: the scaling is not supported, or its values are missing or unknown.
    """
    partial = optional(config, "rotary_pct", optional(config, "partial_rotary_factor", default_partial))
    theta = optional(config, "rotary_emb_base", optional(config, "rope_theta", default_theta))
    rope: dict[str, Any] = {"rope_theta": float(theta), "partial_rotary_factor": float(partial)}
    ignore(config, "original_max_position_embeddings")  # Phi-3 has it without a scaling, too
    for key in ("rope_scaling", "rope_parameters"):
        found: dict[str, Any] = optional(config, key, {})
        if layer_type is not None and layer_type in found:
            found = required(found, layer_type, dict)
        rope |= {name: value for name, value in found.items() if value is not None}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError("config.json: rope parameters that differ between layers are not supported")
    return _rotary_of(rope, config, head_dim)


def _rotary_of(rope: dict[str, Any], config: Mapping[str, Any], head_dim: int) -> Rotary:
    sections, is_interleaved = rope.pop("mrope_section", None), rope.pop("mrope_interleaved", False)
    if sections is not None:
        rope = {key: "default" if key in _KINDS and value == "mrope" else value for key, value in rope.items()}
        return _with_axes(_rotary_of(rope, config, head_dim), sections, is_interleaved=is_interleaved)
    kind = next((rope[key] for key in _KINDS if rope.get(key)), "default")
    if kind not in _SCALINGS:
        raise ConfigError(
            f"config.json: the rope scaling {kind!r} is not supported",
            hint=f"supported: {', '.join(sorted(_SCALINGS))}",
        )
    make, keys = _SCALINGS[kind]
    if unknown := sorted(set(rope) - _COMMON_KEYS - set(keys.split())):
        raise ConfigError(f"config.json: the rope scaling {kind!r} has no {', '.join(map(repr, unknown))}")
    share = required(rope, "partial_rotary_factor", float)
    num_pairs = int(head_dim * share) // 2
    if not 0 < num_pairs <= head_dim // 2:
        raise ConfigError(f"config.json: {share} of a head cannot be rotated; expected more than 0 and at most 1")
    return make(_inverse_frequencies(required(rope, "rope_theta", float), num_pairs), rope, config)


def _with_axes(rotary: Rotary, sections: Any, *, is_interleaved: bool) -> AxisRotary:
    """Return the angles of `rotary` on several axes, with `sections` pairs on each."""
    is_valid = isinstance(sections, list | tuple) and all(type(size) is int and size >= 0 for size in sections)
    if type(rotary) is not Rotary or not is_valid or len(sections) != NUM_AXES or sum(sections) != rotary.num_pairs:
        raise ConfigError(f"config.json: 'mrope_section' is {sections!r} for {rotary.num_pairs} rotated pairs")
    if is_interleaved:  # time, row, column, time, ..., until rows and columns have enough
        axes_C = torch.zeros(rotary.num_pairs, dtype=torch.int64)
        for axis in (1, 2):
            axes_C[axis : NUM_AXES * sections[axis] : NUM_AXES] = axis
    else:
        axes_C = torch.arange(NUM_AXES).repeat_interleave(torch.tensor(sections))
    return AxisRotary(rotary._inverse_frequencies_C, rotary._magnitude, axes_C)


def _inverse_frequencies(theta: float, num_pairs: int) -> Tensor:
    exponents_C = torch.arange(0, 2 * num_pairs, 2, dtype=torch.float32) / (2 * num_pairs)
    return 1.0 / theta**exponents_C


def _default(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    return Rotary(inverse_frequencies_C)


def _linear(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    """Linear scaling: positions divided by a factor."""
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
    """YaRN (arXiv 2309.00071): interpolates by the number of rotations within the original length, and scales
    scores."""
    num_pairs = len(inverse_frequencies_C)
    theta = required(rope, "rope_theta", float)
    original = optional(rope, "original_max_position_embeddings", required(config, "max_position_embeddings", int))
    factor = required(rope, "factor", float)

    def pair_index(turns: float) -> float:
        return num_pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = pair_index(optional(rope, "beta_fast", 32.0))
    last = pair_index(optional(rope, "beta_slow", 1.0))
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


def _dynamic(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    original = optional(rope, "original_max_position_embeddings", required(config, "max_position_embeddings", int))
    theta, factor = required(rope, "rope_theta", float), required(rope, "factor", float)
    return DynamicRotary(theta, len(inverse_frequencies_C), factor, original)


def _longrope(inverse_frequencies_C: Tensor, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    def divided(key: str) -> Tensor:
        factors: list[float] = required(rope, key, list)
        if len(factors) != len(inverse_frequencies_C):
            raise ConfigError(
                f"config.json: {key!r} has {len(factors)} numbers for {len(inverse_frequencies_C)} rotated pairs"
            )
        return inverse_frequencies_C / torch.tensor(factors, dtype=torch.float32)

    longest = required(config, "max_position_embeddings", int)
    original = optional(
        rope, "original_max_position_embeddings", optional(config, "original_max_position_embeddings", longest)
    )
    factor = optional(rope, "factor", longest / original)
    implied = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    magnitude = optional(rope, "attention_factor", implied)
    return LongRotary(divided("short_factor"), divided("long_factor"), original, magnitude)


_KINDS = ("rope_type", "type")
_COMMON_KEYS = frozenset({*_KINDS, "rope_theta", "partial_rotary_factor"})
_Make = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Rotary]
_SCALINGS: dict[str, tuple[_Make, str]] = {
    "default": (_default, ""),
    "dynamic": (_dynamic, "factor original_max_position_embeddings"),
    "linear": (_linear, "factor"),
    "llama3": (_llama3, "factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "longrope": (_longrope, "short_factor long_factor factor attention_factor original_max_position_embeddings"),
    "yarn": (
        _yarn,
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    ),
}
"""The function that makes the angles of each scaling, and the keys that it has in addition to the common ones."""
