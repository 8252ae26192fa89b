"""A quantized matrix of a checkpoint, decoded when it is needed; and how the formats pack small integers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.parallel.sharding import Shard

_OTHER_MODEL = "check that no file of the checkpoint is missing, and that config.json belongs to it"


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """See `octavo.worker_proc.models.linear_weight.QuantizedMatrix`."""

    name: str
    """Name of the layer, for error messages."""
    whole: tuple[int, int]
    """Outputs and inputs of the undivided matrix in the checkpoint."""
    decode: Callable[[], QuantizedWeight]
    """Returns the undivided matrix."""
    outputs_P: Tensor | None = None
    """Outputs of this rank's part; `None` means all."""
    inputs: range | None = None
    """Inputs of this rank's part; `None` means all."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return (
            self.whole[0] if self.outputs_P is None else len(self.outputs_P),
            self.whole[1] if self.inputs is None else len(self.inputs),
        )

    def dequantized(self) -> Tensor:
        """Return the float32 values."""
        if self.inputs is None:
            return self._rows().dequantize()
        return self._rows().dequantize()[:, self.inputs.start : self.inputs.stop]

    def quantized(self) -> QuantizedWeight | None:
        """Return levels and scales; `None` if the inputs are divided and have an order of their own: only values remain
        then.

        Raises:
            ConfigError: this rank's inputs divide a group.
        """
        weight = self._rows()
        if self.inputs is None:
            return weight
        if weight.order_I is not None:
            return None
        ends = [end for end in (self.inputs.start, self.inputs.stop) if end != self.whole[1]]
        # Smaller groups would have the same values, but products would have other bits on another number of ranks.
        if not weight.is_per_channel and any(end % weight.group_size for end in ends):
            raise ConfigError(
                f"{self.name!r} has {self.whole[1]} inputs in groups of {weight.group_size}, which the ranks cannot "
                "divide",
                hint="use a smaller --tensor-parallel-size, or --quantization none",
            )
        return weight.columns(self.inputs)

    def part(self, shard: Shard) -> "StoredMatrix":
        """Return the part that a rank holds."""
        if shard.dim == 0:
            index = torch.cat([torch.tensor(part, dtype=torch.int64) for part in shard.ranges])
            return replace(self, outputs_P=index if self.outputs_P is None else self.outputs_P[index])
        (inputs,) = shard.ranges
        first = 0 if self.inputs is None else self.inputs.start
        return replace(self, inputs=range(first + inputs.start, first + inputs.stop))

    def _rows(self) -> QuantizedWeight:
        try:
            weight = self.decode()
            return weight if self.outputs_P is None else weight.rows(self.outputs_P)
        except ShapeError as error:
            raise ConfigError(
                f"the tensors of {self.name!r} do not fit one another: {error}", hint=_OTHER_MODEL
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class StoredStack:
    """The matrices of all experts of a layer, which a checkpoint holds in one tensor.

    Models split it with `split`. Other methods of a `QuantizedMatrix` raise an error.
    """

    name: str
    """Name of the tensor, for error messages."""
    num_experts: int
    expert: tuple[int, int]
    """Outputs and inputs of each matrix."""
    cut: Callable[[int, int], list[StoredMatrix]]
    """Returns the matrix of an expert, divided by outputs into this many equal parts."""
    is_turned: bool = False
    """Whether the tensor holds the matrices transposed; those of `cut` are not."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.num_experts * self.expert[0], self.expert[1]

    def split(self, num_parts: int) -> Iterator[list[StoredMatrix]]:
        """Yield the matrix of each expert, divided by outputs into equal parts: two for gates and ups.

        Raises:
            ConfigError: the outputs cannot be divided in this way.
        """
        if self.expert[0] % num_parts:
            raise ConfigError(f"{self.name!r} holds {self.expert[0]} gates and ups of each expert, an odd number")
        for expert in range(self.num_experts):
            yield self.cut(expert, num_parts)

    def dequantized(self) -> Tensor:
        """Raise an error; see `part`."""
        raise self._refusal()

    def quantized(self) -> None:
        """Raise an error; see `part`."""
        raise self._refusal()

    def part(self, shard: Shard) -> "StoredStack":
        """Raise an error: a model that supports stacks splits them first.

        Raises:
            ConfigError: always.
        """
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            f"{self.name!r} is a stack of quantized experts, which octavo does not read for this model",
            hint="use a checkpoint whose experts have tensors of their own (experts.0.gate_proj.weight, ...)",
        )


def require(tensors: Mapping[str, Tensor], layer: str, part: str, *, num_dims: int | None = None) -> Tensor:
    """Return a tensor of a layer.

    Args:
        tensors: tensors of the layer, by part.
        layer: name of the layer.
        part: suffix of the tensor's name.
        num_dims: number of dimensions; `None` means any.

    Raises:
        ConfigError: the tensor is missing, or has another number of dimensions.
    """
    if part not in tensors:
        raise ConfigError(
            f"the checkpoint lacks {f'{layer}.{part}'!r}, without which its quantized weight has no values",
            hint=_OTHER_MODEL,
        )
    tensor = tensors[part]
    if num_dims is not None and tensor.ndim != num_dims:
        raise ConfigError(
            f"{f'{layer}.{part}'!r} has shape {tuple(tensor.shape)}; expected {num_dims} dimensions", hint=_OTHER_MODEL
        )
    return tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of the last dimension, uint8; the first one is in the lowest bits.

    Args:
        words: int32, any shape; integers of 3, 5, 6 and 7 bits may span two words.
        bits: 2 to 8.
    """
    if bits not in (2, 4, 8):
        return _unpack_stream(words, bits)
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    mask = 2**bits - 1
    return torch.stack([(bytes_ >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def _unpack_stream(words: Tensor, bits: int) -> Tensor:
    wide = words.to(torch.int64) & 0xFFFFFFFF
    starts = torch.arange(0, wide.shape[-1] * 32, bits)
    pairs = wide | torch.nn.functional.pad(wide[..., 1:], (0, 1)) << 32
    values: Tensor = (pairs[..., starts // 32] >> (starts % 32)) & (2**bits - 1)
    return values.to(torch.uint8)


def zero_of_groups(zero_OG: Tensor, bits: int) -> tuple[int, Tensor | None]:
    """Return `offset` and `zero_OG` of a `QuantizedWeight`. A zero point that all groups share becomes the offset."""
    first = int(zero_OG.flatten()[0]) if zero_OG.numel() else 0
    if first < 2**bits and bool((zero_OG == first).all()):
        return first, None
    return 0, zero_OG.to(torch.uint8)


def sorted_by_group(groups_I: Tensor, group_size: int, layer: str) -> Tensor | None:
    """Return the order that sorts the inputs by group; `None` if they are sorted already.

    Raises:
        ConfigError: a group has another size.
    """
    groups_I = groups_I.long()
    usual_I = torch.arange(len(groups_I)) // group_size
    if torch.equal(groups_I, usual_I):
        return None
    order_I = torch.sort(groups_I, stable=True).indices
    if not torch.equal(groups_I[order_I], usual_I):
        raise ConfigError(
            f"{layer!r} has an order of inputs (g_idx) whose groups do not have {group_size} of them each",
            hint=_OTHER_MODEL,
        )
    return order_I
