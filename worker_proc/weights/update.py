"""Replaces the weights of a serving model layer by layer, so that they are in memory only once.

An update is loaded into a new model, as at start-up. On a CPU that model replaces the old one, whose layers are freed
one by one. On a GPU, where graphs refer to addresses, each layer is copied over the old one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear import PackedLinear, Packer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.models.linear_weight import LinearWeight
from octavo.worker_proc.models.origins import MissingTensorsError
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.models.streamed_packing import StreamedPacking
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.heads import read_head
from octavo.worker_proc.weights.load import computes_on_codes
from octavo.worker_proc.weights.update_source import Source


@dataclass(slots=True)
class WeightStore:
    """The weights of a model that can no longer compute: the only references to them."""

    tensors: dict[str, Tensor]
    """Tensors that are not packed."""
    packed: dict[str, PackedLinear]

    @classmethod
    def of(cls, model: Model) -> "WeightStore":
        """Take the weights of a model, which must not be used afterwards."""
        parameters = model.parameters
        packed = {weight.name: weight.give_up_packed() for weight in parameters.linears}
        tensors = {}
        for name, tensor in parameters.tensors.items():
            tensors[name] = tensor.detach()
            if tensor.device.type == "cpu":  # on a GPU the product of a tied embedding has the same tensor
                tensor.set_()  # type: ignore[call-overload]  # other references to it hold no memory
        return cls(tensors, packed)

    def to(self, device: torch.device) -> None:
        """Move all tensors; tensors that share memory still do afterwards."""
        moved: dict[int, Tensor] = {}
        for name, tensor in self.tensors.items():
            self.tensors[name] = moved[tensor.data_ptr()] = tensor.to(device)
        for name, packed in self.packed.items():
            self.packed[name] = replace(packed, product=_moved(packed.product, device, moved))


@dataclass(frozen=True, slots=True)
class Update:
    """Weights whose names and shapes have been compared with a model."""

    source: Source
    is_partial: bool
    taken: frozenset[str]
    """Names, in the model, of the tensors that the update fills."""


@torch.inference_mode()
def check_update(config: ResolvedConfig, placement: Placement, source: Source, *, is_partial: bool) -> Update:
    """Compare names and shapes of weights with the model. Reads none, except quantized embeddings.

    Args:
        config: engine configuration.
        placement: placement of its model.
        source: source of the weights.
        is_partial: whether the update may lack tensors.

    Raises:
        ConfigError: the update would fail; the message says why.
        RuntimeError: a conversion rule needs values, which is a bug: it would fail with any update.
    """
    shapes = build_model(config.model, replace(placement, device=torch.device("meta")))
    seen = _Names(shapes.parameters)
    try:
        shapes.load_weights(source.shapes(shapes.parameters.wants), packing=seen)
    except MissingTensorsError:
        if not is_partial:
            raise
    seen.require_whole()
    return Update(source, is_partial, frozenset(seen.taken))


class _Names(StreamedPacking):
    """Records which tensors were read, and packs nothing."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__([], Packer(torch.device("cpu")), keeps_quantized=False)
        self._linears = list(parameters.linears)
        self.taken: set[str] = set()

    def take(self, name: str) -> None:
        """See `StreamedPacking`."""
        self.taken.add(name)

    def require_whole(self) -> None:
        """Raise ConfigError if a part of a packed weight is missing."""
        for weight in self._linears:
            missing = weight.tensor_names - self.taken
            if missing and len(missing) < len(weight.tensor_names):
                raise ConfigError(
                    f"the update has {_listed(weight.tensor_names & self.taken)}, and lacks {_listed(missing)}",
                    hint="these tensors are packed together: an update must have all of them, or none",
                )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


@torch.inference_mode()
def load_update(
    config: ResolvedConfig, placement: Placement, update: Update, packer: Packer, store: WeightStore | None
) -> Model:
    """Return a model with the weights of an update.

    Args:
        config: engine configuration.
        placement: placement of its model.
        update: result of `check_update`.
        packer: packer of the model.
        store: the present weights; each is freed when its successor arrives. `None` if there are none.

    Raises:
        ConfigError, OSError, RuntimeError: the weights cannot be read or packed. The store is then incomplete.
    """
    model = build_model(config.model, placement)
    old = store or WeightStore({}, {})
    _share_unchanged(model.parameters, old, update)
    _load(config, model, update, packer, _Replacing(model.parameters, packer, config, old))
    return model


@torch.inference_mode()
def overwrite(config: ResolvedConfig, model: Model, update: Update, packer: Packer) -> None:
    """Copy the weights of an update into those of a model, whose tensors keep their addresses.

    Raises:
        ConfigError, OSError, RuntimeError: see `load_update`; some weights are overwritten.
    """
    parameters = model.parameters
    new = build_model(config.model, parameters.placement)
    for name, tensor in new.parameters.tensors.items():
        if update.is_partial:
            tensor.copy_(parameters.tensors[name])
    copying = _Overwriting(new.parameters, packer, config, parameters)
    _load(config, new, update, packer, copying)
    _copy_tensors(new.parameters, parameters)


def read_new_head(speculation: ResolvedSpeculation, model: Model) -> DraftHead:
    """Load a head's checkpoint into memory of its own, for `overwrite_head`.

    Args:
        speculation: method and facts of the head.
        model: model that drafts with a head. It is not changed, and its weights are not read.

    Raises:
        ConfigError: see `load_head`, or these are not the weights of the model's head.
        OSError, RuntimeError: the weights cannot be read or packed.
    """
    assert model.head is not None, "a model that drafts with a head"
    head, _ = read_head(speculation, model, 1, lambda fraction: None)
    try:
        model.head.parameters.require_sizes(head.parameters.tensors, head.parameters.packed)
    except ValueError as error:
        assert speculation.head is not None, "`read_head` has read it"
        raise ConfigError(
            f"speculative_config: {speculation.head.model_path} has a head with other tensors",
            hint="an update exchanges weights only: start or replace an engine for another head",
        ) from error
    return head


def overwrite_head(head: DraftHead, model: Model) -> None:
    """Copy the weights of `read_new_head` into those of the model's head, whose tensors keep their addresses.

    Raises:
        RuntimeError: a weight is packed in another way, or the device fails; some weights are overwritten.
    """
    assert model.head is not None, "a model that drafts with a head"
    target = model.head.parameters
    for name, packed in head.parameters.packed.items():
        _copy(packed.product, target.packed[name].product)
    _copy_tensors(head.parameters, target)


def _copy_tensors(source: Parameters, target: Parameters) -> None:
    """Copy the plain tensors, and recompute values that are derived from weights."""
    for name, tensor in source.tensors.items():
        target.tensors[name].copy_(tensor)
    for refresh in target.derived:
        refresh()


def _load(config: ResolvedConfig, model: Model, update: Update, packer: Packer, packing: "_Packing") -> None:
    try:
        model.load_weights(update.source.read(model.parameters.wants), packing=packing)
    except MissingTensorsError:
        if not update.is_partial:
            raise
    for weight in model.parameters.linears:
        if weight.is_packed:
            continue
        names = {weight.shared_name} if weight.shared_name else weight.tensor_names
        if update.is_partial and not names & update.taken:
            packing.keep(weight)
        else:
            packing.pack(weight)
    model.parameters.pack(packer)


class _Packing(StreamedPacking, ABC):
    """Packs the weights of an update."""

    def __init__(self, parameters: Parameters, packer: Packer, config: ResolvedConfig) -> None:
        super().__init__(parameters.linears, packer, keeps_quantized=computes_on_codes(config))

    @abstractmethod
    def keep(self, weight: LinearWeight) -> None:
        """Keep the old packed form of a weight that the update lacks."""


class _Replacing(_Packing):
    """Frees each old weight when the first tensor of its successor arrives, so that the new parts reuse its memory."""

    def __init__(self, parameters: Parameters, packer: Packer, config: ResolvedConfig, old: WeightStore) -> None:
        super().__init__(parameters, packer, config)
        self._old = old

    def take(self, name: str) -> None:
        """See `StreamedPacking`."""
        if (weight := self.weight_of(name)) is not None:
            self._old.packed.pop(weight.name, None)
        super().take(name)

    def pack(self, weight: LinearWeight) -> None:
        """See `StreamedPacking`."""
        self._old.packed.pop(weight.name, None)  # of weights that layers share
        super().pack(weight)

    def keep(self, weight: LinearWeight) -> None:
        """See `_Packing`."""
        weight.packed = self._old.packed.pop(weight.name)


class _Overwriting(_Packing):
    """Copies each weight over its predecessor, and frees it."""

    def __init__(self, parameters: Parameters, packer: Packer, config: ResolvedConfig, target: Parameters) -> None:
        super().__init__(parameters, packer, config)
        self._target = target.packed

    def pack(self, weight: LinearWeight) -> None:
        """See `StreamedPacking`."""
        super().pack(weight)
        _copy(weight.packed.product, self._target[weight.name].product)
        weight.packed = self._target[weight.name]

    def keep(self, weight: LinearWeight) -> None:
        """See `_Packing`."""
        weight.packed = self._target[weight.name]


def _share_unchanged(parameters: Parameters, old: WeightStore, update: Update) -> None:
    """Take the plain tensors that the update lacks, and free the old ones that it replaces."""
    for name, tensor in parameters.tensors.items():
        previous = old.tensors.pop(name, None)
        if update.is_partial and previous is not None and name not in update.taken:
            # Parts of a stacked tensor are filled through views, so it keeps its memory.
            tensor.copy_(previous)


def _tensors_of(product: object) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a product that hold tensors, or other products."""
    if is_dataclass(product):
        for field in fields(product):
            value = getattr(product, field.name)
            if isinstance(value, Tensor) or is_dataclass(value):
                yield field.name, value


def _copy(source: Any, target: Any) -> None:
    """Copy all tensors of a product into those of another product of the same kind."""
    for name, value in _tensors_of(source):
        if isinstance(value, Tensor):
            getattr(target, name).copy_(value)
        else:
            _copy(value, getattr(target, name))


def _moved(product: Any, device: torch.device, moved: dict[int, Tensor]) -> Any:
    """Return a product whose tensors are on another device. `moved`: tensors already moved, by their old addresses."""
    changes = {}
    for name, value in _tensors_of(product):
        if not isinstance(value, Tensor):
            changes[name] = _moved(value, device, moved)
        else:
            changes[name] = moved[value.data_ptr()] if value.data_ptr() in moved else value.to(device)
    return replace(product, **changes) if changes else product
