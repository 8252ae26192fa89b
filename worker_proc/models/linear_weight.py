"""The weight of one linear layer, from the tensors of a checkpoint to its packed form. Computes no products."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.linear import PackedLinear, Packer, SizedProduct
from octavo.kernels.linear.native import NativeProduct
from octavo.kernels.linear.quantized import QuantizedWeight, concatenate, have_one_form
from octavo.kernels.linear.stacked import StackedRows
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.parallel.sharding import Role, Shard, Sharding, role_of


class QuantizedMatrix(Protocol):
    """A quantized matrix of a checkpoint, outputs by inputs, converted lazily."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    def dequantized(self) -> Tensor:
        """Return the values in float32."""

    def quantized(self) -> QuantizedWeight | None:
        """Return the levels and scales; `None` if this rank's part has only values."""

    def part(self, shard: Shard) -> "QuantizedMatrix":
        """Return the part that a rank holds.

        Raises:
            ConfigError: the shard cannot be separated without changing the values.
        """


class LinearWeight:
    """A weight that stacks one or several weights of the checkpoint, and its bias.

    Until `pack` it keeps the tensors of the checkpoint, in most cases views of a mapped file. `StreamedPacking` packs a
    weight once all its tensors have arrived, so that reordered copies of rows are in memory for one layer only.

    Args:
        name: name of the layer.
        parts: checkpoint names of the stacked weights, and the number of outputs of each.
        num_inputs: number of inputs of all parts.
        dtype: type of the layer; the checkpoint may have another one.
        device: device of the layer.
        bias_O: bias, filled by the owner of the parameters.
        shared_OI: weight that another layer owns and fills (a tied embedding); `None` if the layer has its own.
    """

    def __init__(
        self,
        name: str,
        parts: Mapping[str, int],
        num_inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        bias_O: Tensor | None = None,
        shared_OI: Tensor | None = None,
    ) -> None:
        self.name = name
        self.parts = parts
        self.num_inputs = num_inputs
        self.num_outputs = sum(parts.values())
        self._dtype = dtype
        self._device = device
        self._bias_O = bias_O
        self._dense_OI = shared_OI
        self._is_shared = shared_OI is not None
        self.exchange: Callable[[Tensor], Tensor] | None = None
        """Combines the products of all ranks, if each of them holds a part of the weight."""
        self.input_sharding: Sharding | None = None
        """How ranks, possibly just one, divide the inputs; `None` if inputs of such a weight are never divided."""
        self.whole_outputs = self.num_outputs
        """Number of outputs of all ranks that divide them."""
        self.is_quantizable = True
        """Whether the weight may be quantized; False: its packed form always holds floats."""
        self.is_grouped = False
        """Whether `octavo.kernels.experts` or `head_linear` multiplies it together with other weights."""
        self.stored: str | None = None
        """Stored format in the checkpoint, for the log; `None` if it is not quantized or was not requested."""
        self._values: dict[str, Tensor | QuantizedMatrix] = {}
        self._packed: PackedLinear | None = None

    @property
    def is_head(self) -> bool:
        """Whether it is the output weight of the model."""
        return self._is_shared or role_of(self.name) is Role.VOCABULARY

    @property
    def is_packed(self) -> bool:
        """Whether it has been packed."""
        return self._packed is not None

    @property
    def has_quantized_parts(self) -> bool:
        """Whether it holds a quantized matrix and is not packed yet."""
        return any(not isinstance(values, Tensor) for values in self._values.values())

    @property
    def tensor_names(self) -> set[str]:
        """Names of the tensors that fill this layer and no other."""
        if self._is_shared:
            return set()
        kinds = ("weight",) if self._bias_O is None else ("weight", "bias")
        return {f"{part}.{kind}" for part in self.parts for kind in kinds}

    @property
    def packed(self) -> PackedLinear:
        """The packed form; available after `pack` and until `give_up_packed`."""
        assert self._packed is not None, f"the weight of {self.name} is not packed yet"
        return self._packed

    @packed.setter
    def packed(self, packed: PackedLinear) -> None:
        """Replace the tensors of the checkpoint by a packed form."""
        self._packed = packed
        self._dense_OI = self._bias_O = None
        self._values.clear()

    @property
    def shared_name(self) -> str | None:
        """Name of the tensor that it shares with another layer (a tied embedding); `None` if it has its own."""
        return next(iter(self.parts)) if self._is_shared else None

    def give_up_packed(self) -> PackedLinear:
        """Return and drop the packed form: the layer can no longer compute."""
        packed, self._packed = self.packed, None
        return packed

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed form; before `pack`, bytes of the dense form unless another layer owns it.

        A GPU multiplies with the dense form directly.
        """
        if self._packed is not None and isinstance(self._packed.product, SizedProduct):
            return self._packed.product.num_bytes
        if self._is_shared and (self._packed is None or self._device.type != "cpu"):
            return 0
        if self._packed is not None and isinstance(self._packed.product, NativeProduct):
            return self._packed.product.packed.num_bytes
        return self.num_outputs * self.num_inputs * self._dtype.itemsize

    def take(self, part: str, values_OI: Tensor | QuantizedMatrix) -> None:
        """Keep a checkpoint tensor for a part; the tensor must not change until `pack`."""
        self._values[part] = values_OI

    def dense(self) -> Tensor:
        """Return the weight in the layer's type, shape OI. If no part was loaded, return a tensor to write into."""
        rows_OI = self._rows()
        if isinstance(rows_OI, StackedRows):
            rows_OI = self._dense_OI = rows_OI.whole()
        return rows_OI

    def _rows(self) -> Tensor | StackedRows:
        """Return the weight, without copying its parts if all of them are tensors."""
        assert self._packed is None, f"the weight of {self.name} is packed"
        if self._dense_OI is None:
            parts = [self._values.get(part) for part in self.parts]
            tensors = [values for values in parts if isinstance(values, Tensor)]
            if len(tensors) == len(parts):
                return StackedRows(tensors, self._dtype, self._device)
            self._dense_OI = torch.empty(self.num_outputs, self.num_inputs, dtype=self._dtype, device=self._device)
            for values, rows_PI in zip(parts, self._dense_OI.split(list(self.parts.values())), strict=True):
                if values is not None:
                    rows_PI.copy_(values if isinstance(values, Tensor) else values.dequantized())
        return self._dense_OI

    def pack(self, packer: Packer, *, keeps_quantized: bool) -> None:
        """Make the packed form.

        Args:
            packer: packer of the model.
            keeps_quantized: whether to pack quantized parts without converting them, if all parts have one form that
                the device can multiply with. Otherwise they are dequantized.

        Raises:
            ConfigError: the packed form cannot represent the scales of a quantized part, or products would have
                different bits on another number of ranks.
        """
        packed = self._pack_quantized(packer) if keeps_quantized and self.is_quantizable else None
        if packed is None:
            rows_OI = self._rows()
            self._values.clear()  # so that only the packer refers to them, and frees them once it has their codes
            packed = packer.pack(
                rows_OI,
                self._bias_O,
                quantizes=self.is_quantizable,
                is_head=self.is_head,
                is_grouped=self.is_grouped,
                whole_outputs=self.whole_outputs,
            )
        if (sharding := self.input_sharding) is not None:
            try:
                packed = packed.in_segments(sharding.num_segments, sharding.size)
            except ShapeError as error:
                raise ConfigError(
                    f"--enable-tp-invariant-inference: {self.name}: {error}",
                    hint="use a smaller --tensor-parallel-size, or leave --enable-tp-invariant-inference out",
                ) from error
        self.packed = packed

    def _pack_quantized(self, packer: Packer) -> PackedLinear | None:
        """Return the packed form of quantized parts; `None` if they have to be dequantized."""
        matrices = self._quantized_parts()
        if matrices is None:
            return None
        parts = [weight for matrix in matrices if (weight := matrix.quantized()) is not None]
        self.stored = " + ".join(dict.fromkeys(part.description for part in parts))
        if len(parts) < len(matrices) or not have_one_form(parts):
            return None
        # Ranks that divide the inputs have only values (`StoredMatrix.quantized`), and one rank must have their bits.
        if packer.is_tp_invariant and self.input_sharding is not None and parts[0].order_I is not None:
            return None
        return packer.pack_quantized(concatenate(parts), self._bias_O, dtype=self._dtype, is_grouped=self.is_grouped)

    def _quantized_parts(self) -> list[QuantizedMatrix] | None:
        """Return the parts in order if all of them are quantized."""
        matrices = []
        for part in self.parts:
            values = self._values.get(part)
            if values is None or isinstance(values, Tensor):
                return None
            matrices.append(values)
        return matrices
