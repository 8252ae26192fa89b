"""The memory layout of a quantized layer, given only the configuration; and dummy weights of that layout."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.codebooks import Codebook, codebook
from octavo.kernels.linear.quantized import QuantizedWeight, RowType
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import optional
from octavo.worker_proc.models.linear_weight import LinearWeight
from octavo.worker_proc.parallel.sharding import Shard
from octavo.worker_proc.weights.quantized.layer_rules import HEAD


@dataclass(frozen=True, slots=True)
class Layout:
    """See `QuantizedWeight`."""

    bits: int
    group_size: int | None
    """`None` means one group of all inputs."""
    codebook: Codebook | None = None
    has_zeros: bool = False
    rows: RowType | None = None


def block_of(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block; `None` if the key is missing, null or an empty list.

    Raises:
        ConfigError: the value is not a pair of positive integers.
    """
    block: list[Any] = optional(config, key, [])
    if not block:
        return None
    if len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise ConfigError(f"config.json: {key!r} in 'quantization_config' is {block!r}; expected two positive integers")
    return block[0], block[1]


@dataclass(frozen=True, slots=True, eq=False)
class DummyMatrix:
    """A matrix of random levels; see `octavo.worker_proc.models.linear_weight.QuantizedMatrix`."""

    shape: tuple[int, int]
    layout: Layout
    key: str
    """Seed of the numbers: the same key gives the same numbers."""

    def dequantized(self) -> Tensor:
        """Return the float32 values, with a deviation of about 1 / sqrt(inputs)."""
        return self.quantized().dequantize()

    def quantized(self) -> QuantizedWeight:
        """Return levels and scales."""
        layout, (num_outputs, num_inputs) = self.layout, self.shape
        generator = torch.Generator().manual_seed(zlib.crc32(self.key.encode()))
        group_size = min(layout.group_size or num_inputs, num_inputs)
        groups = (num_outputs, -(-num_inputs // group_size))
        middle = 0 if layout.codebook else 2 ** (layout.bits - 1)
        if layout.codebook == "e4m3":
            numbers = torch.randn(self.shape, generator=generator)
            levels_OI, deviation = numbers.to(torch.float8_e4m3fn).view(torch.uint8), 1.0
        else:
            levels_OI = torch.randint(0, 2**layout.bits, self.shape, dtype=torch.uint8, generator=generator)
            deviation = float(codebook(layout.codebook).std()) if layout.codebook else 2**layout.bits / math.sqrt(12)
        zeros = torch.randint(max(middle - 1, 0), middle + 1, groups, dtype=torch.uint8, generator=generator)
        return QuantizedWeight(
            levels_OI,
            torch.full(groups, 1 / (deviation * math.sqrt(num_inputs))),
            None,
            0 if layout.has_zeros else middle,
            8 if layout.bits == 8 else 4,
            group_size,
            zero_OG=zeros if layout.has_zeros else None,
            codebook=layout.codebook,
            row_type=layout.rows,
        )

    def part(self, shard: Shard) -> "DummyMatrix":
        """Return the part that a rank holds."""
        num_outputs, num_inputs = shard.part(self.shape)
        return DummyMatrix((num_outputs, num_inputs), self.layout, f"{self.key} {shard.ranges}")


def quantize_dummy(weights: Iterable[LinearWeight], layout_of: Callable[[str], Layout | None], key: str) -> None:
    """Give dummy levels to the weights that a configuration quantizes.

    Args:
        weights: weights of the linear layers that are here.
        layout_of: returns the layout of a layer, given its name in checkpoints; `None` if it is not quantized.
        key: seed of the numbers; the same key gives the same numbers.
    """
    for weight in weights:
        if not weight.is_quantizable or (weight.is_head and HEAD not in weight.parts):
            continue
        for part, num_outputs in weight.parts.items():
            name = part if part == HEAD else f"model.{part}"
            if (layout := layout_of(name)) is not None:
                weight.take(part, DummyMatrix((num_outputs, weight.num_inputs), layout, f"{key} {part}"))
