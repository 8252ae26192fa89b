"""A model's tensors and linear weights, and how a checkpoint's tensors fill them. Does not read files."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.linear import PackedLinear, Packer
from octavo.worker_proc.models.checkpoint import Rule
from octavo.worker_proc.models.layers.adapters import AdapterStack, LayerAdapters
from octavo.worker_proc.models.linear_weight import LinearWeight, QuantizedMatrix
from octavo.worker_proc.models.origins import UnreadTensorError, missing_tensors
from octavo.worker_proc.models.places import Place, fill, oriented
from octavo.worker_proc.models.tensor_names import TensorNames
from octavo.worker_proc.parallel.group import TensorParallelGroup
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.sharding import Role, Shard, Sharding, role_of
from octavo.worker_proc.parallel.stages import Stage, layer_of


class Parameters:
    """The tensors of one model, uninitialized until a checkpoint, or dummy values, fill them.

    Plain tensors (embeddings, norms) are allocated immediately and filled in place. The weight of a linear layer is
    kept in the checkpoint's form, and then packed. Tensors of other pipeline stages have shapes, but no memory.

    Args:
        placement: type and device of the tensors, and the part of them that this rank holds.
        prefixes: prefixes that names in a checkpoint may have ("model.", "transformer.").
        ignored: patterns of names that are not loaded (masks and tables that are computed here).
        rules: rules that turn the tensors of a checkpoint, without their prefixes, into those of the model.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        prefixes: Sequence[str],
        ignored: Sequence[str] = (),
        rules: Sequence[Rule] = (),
    ) -> None:
        self.placement = placement
        self._dtype = placement.dtype
        self._device = placement.device
        self.names = TensorNames(prefixes, ignored, rules)
        """Maps the tensor names of a checkpoint to ours."""
        self._tensors: dict[str, Tensor] = {}
        self._biases: dict[str, Tensor] = {}
        self._linears: dict[str, LinearWeight] = {}
        self._tied: dict[str, LinearWeight] = {}
        self._absent: dict[str, Tensor] = {}
        """Tensors of other stages, without memory."""
        self._places: dict[str, Place] = {}
        self.adaptable: list[LayerAdapters] = []
        """Layers that LoRA adapters can change, including those of other stages."""
        self.stacks: dict[str, AdapterStack] = {}
        """Weights of all experts of a layer, by the name of the tensor that may hold them."""
        self.derived: list[Callable[[], None]] = []
        """Functions that recompute, in place, values that layers derived from weights."""
        self.divided: set[str] = set()
        """Names, as `named` yields them, of the tensors of which each rank holds a different part."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of all tensors."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self._device

    @property
    def group(self) -> TensorParallelGroup | None:
        """Ranks that share every layer; `None` if this is the only one."""
        return self.placement.group

    @property
    def sharding(self) -> Sharding:
        """Sharding of this rank among them."""
        return self.placement.sharding

    @property
    def stage(self) -> Stage:
        """Layers of this pipeline stage."""
        return self.placement.stage

    def shard_of(self, name: str) -> Shard | None:
        """Return the part of the checkpoint's tensor `name` that this rank holds; `None` means all of it."""
        return self._places[name].shard

    def new(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor that is filled from the tensor `name` of the checkpoint, without its prefix.

        `dtype`: `None` means that of the model.
        """
        layer = name.rpartition(".")[0]
        shard = self._shard(layer, shape)
        is_here = self.stage.holds(layer, is_output=False)
        return self._allocate(name, shape, shard, is_here=is_here, dtype=dtype or self._dtype)

    def _allocate(
        self, name: str, shape: tuple[int, ...], shard: Shard | None, *, is_here: bool, dtype: torch.dtype
    ) -> Tensor:
        shape = shard.part(shape) if shard else shape
        tensor = torch.empty(shape, dtype=dtype, device=self._device if is_here else "meta")
        self._places[name] = Place(shape, shard, False, partial(fill, tensor), is_here, dtype.is_floating_point)
        if is_here:
            self._tensors[name] = tensor
            self.divided |= {name} if shard else set()
        else:
            self._absent[name] = tensor
        return tensor

    def stacked(self, name: str, parts: Mapping[str, int], *shape: int) -> Tensor:
        """Allocate a tensor that stacks several tensors of the checkpoint.

        `parts`: their names, and the length of each in the first dimension; `shape`: the other dimensions.
        """
        is_here = self.stage.holds(name.rpartition(".")[0], is_output=False)
        tensor = torch.empty(sum(parts.values()), *shape, dtype=self._dtype, device=self._device if is_here else "meta")
        (self._tensors if is_here else self._absent)[name] = tensor
        for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
            shard = self._shard(part.rpartition(".")[0], tuple(rows.shape))
            self._places[part] = Place(tuple(rows.shape), shard, False, partial(fill, rows), is_here)
            self.divided |= {name} if is_here and shard else set()
        return tensor

    def _shard(self, layer: str, shape: tuple[int, ...]) -> Shard | None:
        return self.placement.sharding.shard(role_of(layer), shape)

    def linear(
        self,
        name: str,
        parts: Mapping[str, int],
        num_inputs: int,
        *,
        bias: bool,
        is_transposed: bool = False,
        is_quantizable: bool = True,
        is_own: bool | None = None,
    ) -> LinearWeight:
        """Make the weight of a linear layer.

        Args:
            name: name of the layer in the model.
            parts: checkpoint layers that are stacked into this one, and the number of outputs of each.
            num_inputs: total number of inputs.
            bias: whether the layers have biases.
            is_transposed: whether the checkpoint holds matrices of shape (inputs, outputs).
            is_quantizable: whether the weight may be quantized; False: it stays as precise as in the checkpoint.
            is_own: False: only another rank has the weight, undivided. `None` if ranks divide it as its role says.
        """
        shards = {
            part: self._shard(part, (num_outputs, num_inputs)) if is_own is None else None
            for part, num_outputs in parts.items()
        }
        outputs = {part: shard.length if shard and shard.dim == 0 else parts[part] for part, shard in shards.items()}
        is_here = is_own is not False and self.stage.holds(name, is_output=True)
        self.divided |= {f"{name}.weight", f"{name}.bias"} if any(shards.values()) else set()
        shard = shards.get(name)
        is_partial = shard is not None and shard.dim == 1
        bias_O = self._bias(name, outputs, shards, is_here=is_here) if bias and not is_partial else None
        weight = LinearWeight(name, outputs, num_inputs, self._dtype, self._device, bias_O)
        weight.is_quantizable = is_quantizable
        weight.whole_outputs = sum(
            shard.size if shard and shard.dim == 0 else parts[part] for part, shard in shards.items()
        )
        if role_of(name) is Role.ROW:
            sharding = self.placement.sharding
            weight.input_sharding = sharding if is_own is None else replace(sharding, rank=0, size=1)
        if is_partial:  # the bias must be added only once
            self.divided.discard(f"{name}.bias")
            sum_bias_O = self.new(f"{name}.bias", outputs[name]) if bias else None
            weight.exchange = partial(self._sum, bias_O=sum_bias_O)
        elif shard is not None and role_of(name) is Role.VOCABULARY:
            weight.exchange = partial(self._gather, shard=shard)
        if is_here:
            self._linears[name] = weight
        for part, num_outputs in outputs.items():
            take = partial(weight.take, part)
            shape = (num_outputs, num_inputs)
            self._places[f"{part}.weight"] = Place(shape, shards[part], is_transposed, take, is_here)
        return weight

    def tied(self, tensor_VD: Tensor) -> LinearWeight:
        """Make the weight of a linear layer that shares a tensor made by `new`."""
        candidates = [*self._tensors.items(), *self._absent.items()]
        (name,) = (name for name, tensor in candidates if tensor is tensor_VD)
        shard = self.shard_of(name)
        if name in self._absent and self.stage.is_last:  # the embedding is on the first stage
            del self._absent[name]
            shape = tuple(tensor_VD.shape)
            tensor_VD = self._allocate(
                name, shard.whole(shape) if shard else shape, shard, is_here=True, dtype=self._dtype
            )
        num_outputs, num_inputs = tensor_VD.shape
        weight = LinearWeight(
            f"tied {name}", {name: num_outputs}, num_inputs, self._dtype, self._device, shared_OI=tensor_VD
        )
        if shard is not None:
            weight.whole_outputs = shard.size
            weight.exchange = partial(self._gather, shard=shard)
        if self.stage.is_last:
            self._linears[weight.name] = self._tied[name] = weight
        return weight

    def adapts(self, adapters: LayerAdapters) -> LayerAdapters:
        """Register that LoRA adapters can change a layer."""
        self.adaptable.append(adapters)
        return adapters

    def parts_of(self, full_name: str, values: Tensor) -> Iterable[tuple[str, Tensor | QuantizedMatrix]]:
        """Yield the tensors of this rank that `load` would fill from a checkpoint tensor, and their values."""
        for name, part in self.names.apply_rules(full_name, values):
            stack = self.stacks.get(name)
            yield from [(name, part)] if stack is None or not isinstance(part, Tensor) else stack.split(name, part)

    def stack_of(self, full_name: str) -> AdapterStack | None:
        """Return the stack that a checkpoint tensor holds; `None` if it is not a stack."""
        ((name, _),) = self.names.apply_rules(full_name, torch.empty(0))
        return self.stacks.get(name)

    def _bias(
        self, name: str, parts: Mapping[str, int], shards: Mapping[str, Shard | None], *, is_here: bool
    ) -> Tensor:
        bias_O = torch.empty(sum(parts.values()), dtype=self._dtype, device=self._device if is_here else "meta")
        if is_here:
            self._biases[f"{name}.bias"] = bias_O
        for part, values_P in zip(parts, bias_O.split(list(parts.values())), strict=True):
            take = partial(fill, values_P)
            self._places[f"{part}.bias"] = Place(tuple(values_P.shape), shards[part], False, take, is_here)
        return bias_O

    def _sum(self, partial_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        assert self.group is not None, "a weight of one rank among several"
        return self.group.all_reduce(partial_TO, bias_O, self._dtype)

    def _gather(self, outputs_TP: Tensor, shard: Shard) -> Tensor:
        assert self.group is not None, "a weight of one rank among several"
        return self.group.all_gather(outputs_TP, shard.ranges[0].start, shard.size)

    def unpadded_rows(self, num_rows: int) -> int:
        """Return the next row count that no product with a packed weight pads, on any rank. All ranks must call it."""
        while (rows := self._most_padded_rows(num_rows)) > num_rows:
            num_rows = rows
        return num_rows

    def _most_padded_rows(self, num_rows: int) -> int:
        rows = max((weight.packed.padded_rows(num_rows) for weight in self._linears.values()), default=num_rows)
        if self.group is None:
            return rows
        # Parts of different sizes, such as those of a vocabulary, may be padded differently.
        sharding = self.placement.sharding
        rows_11 = torch.tensor([[rows]], device=self._device)
        return int(self.group.all_gather(rows_11, sharding.rank, sharding.size).max())

    def named(self, *, is_unquantized: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors, to write into them before they are packed. Stacked tensors have their own names.

        `is_unquantized`: whether to leave out weights that have quantized parts.
        """
        yield from self._tensors.items()
        for name, weight in self._linears.items():
            if weight not in self._tied.values() and not (is_unquantized and weight.has_quantized_parts):
                yield f"{name}.weight", weight.dense()
        yield from self._biases.items()

    def pack(self, packer: Packer, *, keeps_quantized: bool = False) -> None:
        """Pack the loaded weights. Nothing can be loaded afterwards.

        Args:
            packer: packer of the model's device.
            keeps_quantized: whether weights that are quantized in the checkpoint stay so.

        Raises:
            ConfigError: a weight cannot be packed; the message names it.
        """
        for weight in self._linears.values():
            if not weight.is_packed:
                weight.pack(packer, keeps_quantized=keeps_quantized)
        self._drop_loading_state()

    @property
    def linears(self) -> Iterable[LinearWeight]:
        """The weights of all linear layers of this pipeline stage."""
        return self._linears.values()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The plain tensors, by name."""
        return self._tensors

    @property
    def packed(self) -> dict[str, PackedLinear]:
        """The packed weights of all linear layers, by name."""
        return {name: weight.packed for name, weight in self._linears.items()}

    def adopt(self, tensors: Mapping[str, Tensor], packed: Mapping[str, PackedLinear]) -> None:
        """Use the `tensors` and `packed` of an earlier run instead of loading and packing.

        Raises:
            ValueError: the tensors belong to another model; nothing was changed.
        """
        self.require_sizes(tensors, packed)
        for name, tensor in self._tensors.items():
            # The layers refer to this tensor object, so its memory is replaced.
            tensor.set_(tensors[name])  # type: ignore[call-overload]
        for name, weight in self._linears.items():
            weight.packed = packed[name]
        self._drop_loading_state()

    def require_sizes(self, tensors: Mapping[str, Tensor], packed: Mapping[str, PackedLinear]) -> None:
        """Compare names, shapes and types of `tensors` and `packed` with those of this model.

        Raises:
            ValueError: the tensors belong to another model.
        """
        mine: dict[str, object] = {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}
        mine |= {name: (weight.num_outputs, weight.num_inputs) for name, weight in self._linears.items()}
        given: dict[str, object] = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        given |= {name: (weight.num_outputs, weight.num_inputs) for name, weight in packed.items()}
        if mine != given:
            raise ValueError("it holds the weights of another model")

    def _drop_loading_state(self) -> None:
        for loading in (self._places, self._absent, self._biases, self._tied):
            loading.clear()
        self.names.forget_splits()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, packed or not."""
        plain = sum(tensor.nbytes for tensor in (*self._tensors.values(), *self._biases.values()))
        return plain + sum(weight.num_bytes for weight in self._linears.values())

    def sizes(self) -> tuple[list[int], int]:
        """Return the bytes of each layer's weights, and of the output weight, as if unpacked."""
        layers: dict[int, int] = {}
        output_bytes = 0
        for name, place in self._places.items():
            num_bytes = math.prod(place.shape) * self._dtype.itemsize
            if (layer := layer_of(name)) is not None:
                layers[layer] = layers.get(layer, 0) + num_bytes
        for name, weight in self._linears.items():
            if name in {tied.name for tied in self._tied.values()} or role_of(name) is Role.VOCABULARY:
                output_bytes += weight.num_outputs * weight.num_inputs * self._dtype.itemsize
        return [layers[layer] for layer in sorted(layers)], output_bytes

    def wants(self, full_name: str) -> bool:
        """Return whether a checkpoint tensor must be read; False if only other stages hold it."""
        place = self._places.get(self.names.without_prefix(full_name))
        return place is None or place.is_here

    def load(
        self,
        weights: Iterable[tuple[str, Tensor | QuantizedMatrix]],
        on_taken: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Fill every tensor from a checkpoint. The checkpoint's tensors must not change until the weights are packed.

        Args:
            weights: weights of the checkpoint, by name.
            on_taken: called with the model's name of each tensor that was filled.

        Raises:
            ConfigError: a tensor is missing, unexpected, or of another shape.
        """
        missing = {name for name, place in self._places.items() if place.is_here}
        for full_name, name, part in self.names.read(weights):
            self._take(name, part, full_name)
            missing.discard(name)
            on_taken(name)
        if missing:
            raise missing_tensors(self.names.origins_of(missing))

    def _is_zero_bias(self, name: str, values: Tensor | QuantizedMatrix) -> bool:
        """Return whether this is a bias of zeros, which old AutoGPTQ wrote for layers that have no bias."""
        layer, _, kind = name.rpartition(".")
        has_layer = kind == "bias" and f"{layer}.weight" in self._places
        return has_layer and isinstance(values, Tensor) and not values.any()

    def _take(self, name: str, values: Tensor | QuantizedMatrix, full_name: str) -> None:
        """Fill the tensor `name` from the checkpoint tensor `full_name`, or from a part of it."""
        if name not in self._places:
            if self.names.is_ignored(name) or self._is_zero_bias(name, values):
                return
            raise UnreadTensorError(full_name)
        if not self._places[name].is_here:
            return
        own = oriented(self._places[name], values, full_name)
        self._places[name].take(own)
        if name in self._tied and not isinstance(own, Tensor):
            self._tied[name].take(name, own)
