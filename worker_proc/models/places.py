"""Destinations of a checkpoint's tensors in the model, and their layouts."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.parallel.sharding import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Destination of one tensor of the checkpoint."""

    shape: tuple[int, ...]
    """Shape of this rank's part, in the layout of the model."""
    shard: Shard | None
    """This rank's part of the checkpoint's tensor; `None` means all of it."""
    is_transposed: bool
    """Whether the checkpoint holds the transposed matrix. Quantized matrices are never transposed."""
    take: Callable[[Tensor | QuantizedMatrix], None]
    """Stores this rank's part of the values."""
    is_here: bool = True
    """Whether this pipeline stage holds the tensor. If not, the checkpoint's tensor is not read."""
    is_float: bool = True
    """Whether the tensor holds floating-point numbers."""


def oriented(place: Place, values: Tensor | QuantizedMatrix, name: str) -> Tensor | QuantizedMatrix:
    """Return this rank's part of the values, in the layout of the parameter.

    Raises:
        ConfigError: the values have another shape or type.
    """
    if place.is_float and isinstance(values, Tensor) and not values.is_floating_point():
        raise ConfigError(
            f"{name!r} has type {str(values.dtype).removeprefix('torch.')} in the checkpoint, but weights are "
            "floating-point numbers",
            hint="integer weights need the quantization_config of their format in config.json",
        )
    is_transposed = place.is_transposed and isinstance(values, Tensor)
    whole = place.shard.whole(place.shape) if place.shard else place.shape
    expected = whole[::-1] if is_transposed else whole
    if tuple(values.shape) != expected:
        raise ConfigError(
            f"{name!r} has shape {tuple(values.shape)} in the checkpoint; its config.json asks for {expected}"
        )
    oriented = values.t() if isinstance(values, Tensor) and is_transposed else values
    if place.shard is None:
        return oriented
    return place.shard.of(oriented) if isinstance(oriented, Tensor) else oriented.part(place.shard)


def fill(target: Tensor, values: Tensor | QuantizedMatrix) -> None:
    """Copy the values of a checkpoint tensor into an allocated one."""
    target.copy_(values if isinstance(values, Tensor) else values.dequantized())
