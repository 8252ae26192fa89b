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


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Matrix:
    """A matrix in its stored form; see `octavo.worker_proc.models.linear_weight.QuantizedMatrix`."""

    name: str
    blocks_OGB: Tensor
    """uint8, 16 bytes per group."""
    scales_OG: Tensor
    """uint8."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.scales_OG.shape[0], self.scales_OG.shape[1] * GROUP

    def dequantized(self) -> Tensor:
        """Return the float32 values."""
        return self.quantized().dequantize()

    def quantized(self) -> QuantizedWeight:
        """Return the codes and scales."""
        scale_OG = self.scales_OG.contiguous().view(torch.float8_e8m0fnu).float()
        return QuantizedWeight(self._codes().view(self.shape), scale_OG, None, 0, 4, GROUP, codebook="e2m1")

    def part(self, shard: Shard) -> "Mxfp4Matrix":
        """Return the part that a rank holds.

        Raises:
            ConfigError: the shard begins or ends within a group.
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

    def _codes(self) -> Tensor:
        """Return the codes, uint8, shape OGI."""
        return torch.stack((self.blocks_OGB & 15, self.blocks_OGB >> 4), -1).flatten(2)


class Mxfp4Stack:
    """The two stacked tensors of all experts' matrices, which arrive in any order."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, values: object) -> Iterator[Mxfp4Matrix]:
        """Return the matrices once both tensors, `<name>_blocks` and `<name>_scales`, are there; otherwise nothing.

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
