"""Reads an adapter in PEFT's format: the factors of each module, as tensors in host memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from octavo.protocol.adapters import Adapter, adapter_digest, adapter_files
from octavo.protocol.errors import ConfigError
from octavo.protocol.peft_lora import AGAIN, PeftLora, read_peft_lora
from octavo.protocol.peft_tensors import StoredTensor, places_of
from octavo.worker_proc.weights.pytorch import read_tensors


@dataclass(slots=True, eq=False)
class ModuleFactors:
    """The factors that an adapter adds to one module of the base model."""

    is_embedding: bool
    scale: float
    a: Tensor | None = None
    """Factor A: RI; for an embedding RV; for the weights of all experts ERI."""
    b: Tensor | None = None
    """Factor B: OR; for an embedding DR; for the weights of all experts EOR."""

    @property
    def is_plain(self) -> bool:
        """Whether the factors belong to one weight, not to a stack of weights."""
        return self.both[0].ndim == 2

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """A and B, which every module of a loaded adapter has."""
        assert self.a is not None and self.b is not None, "a module with one factor"
        return self.a, self.b


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTensors:
    """An adapter in host memory."""

    where: str
    """File of the adapter, for errors."""
    config: PeftLora
    modules: dict[str, ModuleFactors] = field(default_factory=dict)
    """Factors by the name of the module in the base model."""
    base_weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of base model weights that the file repeats: PEFT saves embeddings together with their adapters."""


def read_adapter(adapter: Adapter) -> AdapterTensors:
    """Return the tensors of an adapter, if its files are still those that the frontend checked.

    Raises:
        ConfigError: the files are not an adapter, or something in them is not supported; the message names it.
    """
    path = Path(adapter.path)
    try:
        config_file, weights_file = adapter_files(path)
        if adapter_digest(path) != adapter.digest:
            raise ConfigError(
                f"{path} has changed since the adapter {adapter.name!r} was loaded",
                hint="load the adapter again, under this name or another",
            )
        config = read_peft_lora(config_file.read_bytes(), str(config_file))
        tensors = _read_tensors(weights_file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=AGAIN) from error
    return _sorted_out(tensors, config, str(weights_file))


def _read_tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load(file.read_bytes())
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {error}", hint=AGAIN) from error
    return read_tensors(file)


def _sorted_out(tensors: Mapping[str, Tensor], config: PeftLora, where: str) -> AdapterTensors:
    adapter = AdapterTensors(where, config)
    stored = {
        name: StoredTensor(str(tensor.dtype), tensor.is_floating_point(), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    for name, place in places_of(stored, config, where).items():
        tensor, rank = tensors[name], place.rank
        if place.factor == "base":
            adapter.base_weights[place.module] = tuple(tensor.shape)
            continue
        is_a, is_embedding = place.factor.endswith("A"), place.factor.startswith("embedding")
        factors = adapter.modules.setdefault(place.module, ModuleFactors(is_embedding, place.scale))
        if place.is_stack:
            tensor = tensor.unflatten(0, (-1, rank)) if is_a else tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
        setattr(factors, "a" if is_a else "b", tensor)
    return adapter
