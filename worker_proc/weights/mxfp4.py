"""Microscaling 4-bit floats (MXFP4, OCP Microscaling Formats 1.0): groups of 32 inputs share a power of two.

A checkpoint holds two tensors for a matrix: blocks, two numbers (e2m1) in each byte with the first one in the low half,
and scales (e8m0), the exponents plus 127. All values are exact in bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.parallel.sharding import Shard

GROUP = 32
"""Inputs that share a scale."""
_HALVES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the value of each number."""
_OFFSET = 12


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Matrix:
    """A matrix as it lies in the file; see `octavo.worker_proc.models.linear_weight.QuantizedMatrix`."""

    name: str
    blocks_OGB: Tensor
    """uint8, 16 bytes for each group."""
    scales_OG: Tensor
    """uint8."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.scales_OG.shape[0], self.scales_OG.shape[1] * GROUP

    def dequantized(self) -> Tensor:
        """Return the float32 values."""
        halves_OGI = self._halves().float()
        return torch.ldexp(halves_OGI, self.scales_OG.int().unsqueeze(2) - 128).view(self.shape)

    def quantized(self) -> QuantizedWeight:
        """Return the values as 8-bit levels.

        Raises:
            ConfigError: a scale is not a float16 number.
        """
        scale_OG = torch.exp2(self.scales_OG.float() - 128.0)
        if not torch.equal(scale_OG.half().float(), scale_OG):
            raise ConfigError(f"{self.name!r} has scales that are not float16 numbers")
        levels_OI = (self._halves() + _OFFSET).to(torch.uint8).view(self.shape)
        return QuantizedWeight(levels_OI, scale_OG.half(), None, _OFFSET, 8, GROUP)

    def part(self, shard: Shard) -> "Mxfp4Matrix":
        """Return the part that a rank holds.

        Raises:
            ConfigError: it begins or ends within a group.
        """
        if shard.dim == 0:
            return Mxfp4Matrix(self.name, shard.of(self.blocks_OGB), shard.of(self.scales_OG))
        (inputs,) = shard.ranges
        if inputs.start % GROUP or inputs.stop % GROUP:
            raise ConfigError(
                f"{self.name!r} has {shard.size} inputs in groups of {GROUP}, which the ranks cannot divide",
                hint="add --enable-expert-parallel, or use another size",
            )
        groups = slice(inputs.start // GROUP, inputs.stop // GROUP)
        return Mxfp4Matrix(self.name, self.blocks_OGB[:, groups], self.scales_OG[:, groups])

    def _halves(self) -> Tensor:
        """Return twice each number before it is scaled, int8, shape OGI."""
        pairs = torch.stack((self.blocks_OGB & 15, self.blocks_OGB >> 4), -1)
        return _HALVES[pairs.flatten(2).int()]


class Mxfp4Stack:
    """The two tensors of the matrices of all experts, which come in any order."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, values: object) -> Iterator[Mxfp4Matrix]:
        """Return the matrices when both tensors are there, `<name>_blocks` and `<name>_scales`.

        Raises:
            ConfigError: their shapes or types do not fit.
        """
        if not isinstance(values, Tensor) or values.dtype != torch.uint8:
            raise ConfigError(f"{name!r} does not hold bytes")
        kind = name.rpartition("_")[2]
        self._tensors[kind] = values
        if len(self._tensors) < 2:
            return
        blocks, scales = self._tensors.pop("blocks"), self._tensors.pop("scales")
        if blocks.shape != (*scales.shape, GROUP // 2) or scales.ndim != 3 or len(scales) != self._num_experts:
            raise ConfigError(
                f"{name!r} and its counterpart have shapes {tuple(blocks.shape)} and {tuple(scales.shape)} in the "
                f"checkpoint; its config.json asks for {self._num_experts} experts"
            )
        for expert in range(self._num_experts):
            yield Mxfp4Matrix(name, blocks[expert], scales[expert])
