"""The adapters of all layers of a model, in slots; and the division of a PEFT adapter's tensors among the layers."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.lora import LoraSlots, lora, lora_embedding, new_slots
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraPart, LoraShape
from octavo.protocol.config.lora import ResolvedLoRA
from octavo.protocol.errors import ConfigError
from octavo.protocol.peft_lora import MERGE, has_oriented_stacks
from octavo.worker_proc.lora.checkpoint import AdapterTensors, ModuleFactors
from octavo.worker_proc.lora.division import Division, divide
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.layers.adapters import LayerAdapters

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_RETRAIN = "train the adapter without it, or merge the adapter into the model"

PlacedAdapter = dict[LayerAdapters, list[LoraPart | None]]
"""The parts of an adapter for the layers that are here."""


class AdapterSlots:
    """The slots of a model, for `max_loras` adapters of up to `max_rank`. Layers add their contents from now on.

    Args:
        model: packed; its steps are not recorded yet.
        config: adapter configuration.
        is_tp_invariant: whether results must have the same bits with any number of ranks.

    Raises:
        ConfigError: the model cannot have adapters.
    """

    def __init__(self, model: Model, config: ResolvedLoRA, *, is_tp_invariant: bool = False) -> None:
        if not model.parameters.adaptable:
            raise ConfigError(
                "--enable-lora: a model that runs through transformers takes no adapters",
                hint="leave --enable-lora out, or merge the adapter into the model",
            )
        self._parameters = model.parameters
        self._max_rank = config.max_rank
        self._is_tp_invariant = is_tp_invariant
        self._dtype = _DTYPES[config.dtype]
        self.rows = model.adapter_rows = AdapterRows(config.max_loras)
        self._layers: dict[LayerAdapters, LoraSlots] = {}
        self._divisions: dict[LayerAdapters, Division] = {}
        self._parts: dict[str, tuple[LayerAdapters, int]] = {}
        for layer in model.parameters.adaptable:
            self._parts |= {part: (layer, index) for index, part in enumerate(layer.parts)}
            if layer.is_here:
                self._layers[layer] = slots = self._new_slots(layer, model, config)
                self._attach(layer, slots)

    def move_to(self, model: Model) -> dict[LayerAdapters, LayerAdapters]:
        """Connect the slots to the layers of another model with the same layers.

        Returns:
            The layers of that model, keyed by those of the present one.
        """
        parameters = model.parameters
        new_of = dict(zip(self._parameters.adaptable, parameters.adaptable, strict=True))
        self._parameters, model.adapter_rows = parameters, self.rows
        self._parts = {part: (new_of[layer], index) for part, (layer, index) in self._parts.items()}
        self._layers = {new_of[layer]: slots for layer, slots in self._layers.items()}
        self._divisions = {new_of[layer]: division for layer, division in self._divisions.items()}
        for layer, slots in self._layers.items():
            layer.follows_exchange = self._divisions[layer].follows_exchange
            self._attach(layer, slots)
        return new_of

    def _attach(self, layer: LayerAdapters, slots: LoraSlots) -> None:
        if layer.is_mixture:
            layer.slots, layer.rows = slots, self.rows
        else:
            layer.add = _addition(layer, slots, self.rows, self._divisions[layer])

    def _new_slots(self, layer: LayerAdapters, model: Model, config: ResolvedLoRA) -> LoraSlots:
        shape = LoraShape(
            layer.num_inputs,
            layer.widths,
            config.max_loras,
            config.max_rank,
            self._dtype,
            layer.is_table,
            num_experts=len(layer.own_experts),
        )
        division = divide(layer, shape, model, is_fully_sharded=config.is_fully_sharded)
        self._divisions[layer] = division
        layer.follows_exchange = division.follows_exchange
        return new_slots(division.shape, model.device, model.library, division.exchange)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(slots.num_bytes for slots in self._layers.values())

    def put(self, slot: int, adapter: PlacedAdapter) -> None:
        """Fill a slot."""
        for layer, slots in self._layers.items():
            if (parts := adapter.get(layer)) is None:
                slots.clear(slot)
            else:
                slots.put(slot, parts)

    def clear(self, slot: int) -> None:
        """Empty a slot. Requests that use it are computed without an adapter."""
        for slots in self._layers.values():
            slots.clear(slot)

    def place(self, adapter: AdapterTensors) -> PlacedAdapter:
        """Divide an adapter among the layers that are here. Layers of other stages are checked as well.

        Raises:
            ConfigError: a tensor has no place in the model, or another shape.
        """
        where = adapter.where
        if adapter.config.max_rank > self._max_rank:
            raise ConfigError(
                f"{where}: the adapter has rank {adapter.config.max_rank}, above --max-lora-rank {self._max_rank}",
                hint=f"use --max-lora-rank {adapter.config.max_rank}",
            )
        for module, shape in adapter.base_weights.items():
            self._check_base(module, shape, where)
        placed: PlacedAdapter = {}
        for module, factors in adapter.modules.items():
            a, b = factors.both if factors.is_plain else self._oriented(module, factors, adapter)
            start, rows = 0, b[..., 0].numel()
            for name, b_PR in self._parameters.parts_of(f"{module}.weight" if factors.is_plain else module, b):
                if not isinstance(b_PR, Tensor) or b_PR.ndim != 2:
                    raise self._unknown_module(module, where)
                layer, index = self._place_of(name.removesuffix(".weight"), module, factors, where)
                a_RI = a if factors.is_plain else a[start * len(a) // rows]
                start += len(b_PR)
                part = self._part(layer, index, LoraPart(a_RI, b_PR, factors.scale), module, where)
                own = layer.own_parts
                if layer.is_here and index in own:
                    placed.setdefault(layer, [None] * len(own))[own.index(index)] = part
            assert start == rows, f"{start} rows of {rows} of {module}"
        return placed

    def _oriented(self, module: str, factors: ModuleFactors, adapter: AdapterTensors) -> tuple[Tensor, Tensor]:
        """Return the factors of all experts' weights, with A for their inputs.

        Earlier versions of PEFT took the dimensions of a stack for inputs and outputs, in this order.

        Raises:
            ConfigError: the model has no such weights, or other ones.
        """
        a_ERI, b_EOR = factors.both
        stack = self._parameters.stack_of(module)
        if stack is None:
            raise self._unknown_module(module, adapter.where)
        names = [name.removesuffix(".weight") for name, _ in stack.split(module, torch.empty(len(b_EOR), 2, 0))]
        shapes = [self._parts[name][0].whole_shape(name) for name in names if name in self._parts]
        if not shapes:
            raise self._unknown_module(module, adapter.where)
        sizes = shapes[0][1], sum(outputs for outputs, _ in shapes) // len(b_EOR)
        is_square = sizes[0] == sizes[1] and not stack.is_turned
        if is_square and not has_oriented_stacks(adapter.config.peft_version):
            raise ConfigError(
                f"{adapter.where}: which factor of the square weights {module!r} is A depends on peft's version, and "
                f"peft_version is {adapter.config.peft_version!r}",
                hint="merge the adapter into the model with the version of peft that has written it",
            )
        if not is_square and (a_ERI.shape[2], b_EOR.shape[1]) == sizes[::-1]:
            return b_EOR.mT, a_ERI.mT
        return a_ERI, b_EOR

    def _place_of(self, name: str, module: str, factors: ModuleFactors, where: str) -> tuple[LayerAdapters, int]:
        place = self._parts.get(name)
        if place is None or place[0].is_table != factors.is_embedding:
            raise self._unknown_module(module, where)
        return place

    def _unknown_module(self, module: str, where: str) -> ConfigError:
        return ConfigError(
            f"{where}: the adapter changes {module!r}, which is not a linear layer of this model or of a kind that "
            "adapters cannot change, such as experts that several engines divide",
            hint=f"serve it with the model that it was trained on; {_RETRAIN}",
        )

    def _part(self, layer: LayerAdapters, index: int, factors: LoraPart, module: str, where: str) -> LoraPart:
        name = list(layer.parts)[index]
        shard, (outputs, inputs) = layer.shards[name], layer.whole_shape(name)
        a_RI, b_OR = factors.a_RI, factors.b_OR
        if a_RI.shape[1] != inputs or len(b_OR) != outputs:
            raise ConfigError(
                f"{where}: the adapter of {module!r} has {a_RI.shape[1]} inputs and {len(b_OR)} outputs; this model's "
                f"has {inputs} and {outputs}",
                hint="serve it with the model that it was trained on",
            )
        if self._is_tp_invariant and layer.is_mixture and shard is not None and shard.dim == 1:
            raise ConfigError(
                f"{where}: the adapter changes {module!r}, whose inputs workers divide: under "
                "--enable-tp-invariant-inference the sums would depend on their number",
                hint="use --enable-expert-parallel, which gives each worker whole experts, or one worker",
            )
        if shard is not None and (shard.dim == 1 or layer.is_table):
            a_RI = torch.cat([a_RI[:, part.start : part.stop] for part in shard.ranges], dim=1)
        elif shard is not None:
            b_OR = shard.of(b_OR)
        if layer.is_here and (own := self._divisions[layer].outputs) is not None:
            b_OR = b_OR[own.start : own.stop]
        a_RI, b_OR = a_RI.to(self._dtype).contiguous(), b_OR.to(self._dtype).contiguous()
        if not all(math.isfinite(factor.sum(dtype=torch.float32)) for factor in (a_RI, b_OR)):
            raise ConfigError(
                f"{where}: the adapter of {module!r} has numbers that are NaN, infinite or too large for {self._dtype}",
                hint="train it again, or use --lora-dtype float32 if only the type is too small",
            )
        return LoraPart(a_RI, b_OR, factors.scale)

    def _check_base(self, module: str, shape: tuple[int, ...], where: str) -> None:
        """Refuse a table of another size: PEFT saves resized embeddings together with their adapters."""
        for name, _ in self._parameters.parts_of(f"{module}.weight", torch.empty(0)):
            layer, _ = self._parts.get(name.removesuffix(".weight"), (None, 0))
            outputs, inputs = layer.whole_shape(name.removesuffix(".weight")) if layer else (0, 0)
            if sorted(shape) != sorted((outputs, inputs)):
                raise ConfigError(
                    f"{where}: the adapter replaces {module!r} by a weight of shape {shape}",
                    hint=MERGE,
                )


def _addition(
    layer: LayerAdapters, slots: LoraSlots, rows: AdapterRows, division: Division
) -> Callable[[Tensor, Tensor], Tensor]:
    if layer.is_table:
        return partial(_add_lookup, slots=slots, rows=rows, first_id=layer.first_id)
    add = partial(lora, slots=slots, rows=rows)
    own, gather_outputs = division.outputs, division.gather_outputs
    if own is None:
        return add

    def add_own_outputs(x_TI: Tensor, y_TO: Tensor) -> Tensor:
        width = y_TO.shape[1]
        _, own_TP, _ = y_TO.split([own.start, len(own), width - own.stop], dim=1)
        new_TP = add(x_TI, own_TP)
        if gather_outputs is not None:
            return gather_outputs(new_TP)
        if new_TP is not own_TP:  # not computed in place
            own_TP.copy_(new_TP)
        return y_TO

    return add_own_outputs


def _add_lookup(token_ids_T: Tensor, y_TD: Tensor, *, slots: LoraSlots, rows: AdapterRows, first_id: int) -> Tensor:
    return lora_embedding(token_ids_T, y_TD, slots, rows, first_id=first_id)
