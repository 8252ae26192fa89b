"""Reads an adapter in PEFT's format: the factors of each module, as tensors in host memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from octavo.protocol.adapters import Adapter, adapter_digest, adapter_files
from octavo.protocol.errors import ConfigError
from octavo.protocol.peft_lora import PHASE, PeftLora, module_of, read_peft_lora
from octavo.worker_proc.weights.pytorch import read_tensors

_AGAIN = "write the adapter again, with peft's save_pretrained"


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
                phase=PHASE,
                hint="load the adapter again, under this name or another",
            )
        config = read_peft_lora(config_file.read_bytes(), str(config_file))
        tensors = _read_tensors(weights_file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", phase=PHASE, hint=_AGAIN) from error
    return _sorted_out(tensors, config, str(weights_file))


def _read_tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load(file.read_bytes())
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {error}", phase=PHASE, hint=_AGAIN) from error
    return read_tensors(file)


def _sorted_out(tensors: Mapping[str, Tensor], config: PeftLora, where: str) -> AdapterTensors:
    adapter = AdapterTensors(where, config)
    for name, tensor in tensors.items():
        module, factor = module_of(name, where)
        if factor == "base":
            adapter.base_weights[module] = tuple(tensor.shape)
            continue
        if not tensor.is_floating_point() or tensor.ndim != 2:
            raise _checkpoint_error(where, f"{name!r} has type {tensor.dtype} and shape {tuple(tensor.shape)}")
        is_embedding = factor.startswith("embedding")
        module, parameter = _parameter_of(module, config, name, where)
        if parameter is None and not config.targets(module):
            raise _checkpoint_error(where, f"{name!r} belongs to a module that target_modules does not name")
        key = module if parameter is None else f"{module}.{parameter}"
        is_stack = parameter not in (None, "weight")
        factors = adapter.modules.setdefault(
            key if is_stack else module, ModuleFactors(is_embedding, config.scale_of(key))
        )
        rank, dim = config.rank_of(key), 0 if factor[-1] == "A" else 1
        has_rank = tensor.shape[dim] % rank == 0 if is_stack else tensor.shape[dim] == rank
        if factors.is_embedding != is_embedding or not has_rank:
            raise _checkpoint_error(
                where, f"{name!r} has shape {tuple(tensor.shape)}, and adapter_config.json gives it the rank {rank}"
            )
        if is_stack:  # A has all ranks of an expert after those of the previous expert; B has all experts of each rank
            tensor = tensor.unflatten(0, (-1, rank)) if dim == 0 else tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
        setattr(factors, factor[-1].lower(), tensor)
    for module, factors in adapter.modules.items():
        if factors.a is None or factors.b is None:
            raise _checkpoint_error(where, f"{module!r} has only one of its two factors")
        if factors.b.ndim == 3 and len(factors.a) != len(factors.b):
            raise _checkpoint_error(
                where, f"{module!r} has an A of {len(factors.a)} experts, and a B of {len(factors.b)}"
            )
    if not adapter.modules:
        raise _checkpoint_error(where, "it changes nothing")
    return adapter


def _parameter_of(module: str, config: PeftLora, name: str, where: str) -> tuple[str, str | None]:
    """Return the module without PEFT's wrappers, and which of its parameters is changed; `None` for a layer.

    The wrapper of each parameter of a module encloses the wrappers of the parameters before it.
    """
    depth = 0
    while module.endswith(".base_layer"):
        module, depth = module.removesuffix(".base_layer"), depth + 1
    parameters = config.parameters_of(module)
    if depth >= max(1, len(parameters)):
        raise _checkpoint_error(where, f"{name!r} belongs to a parameter that target_parameters does not name")
    return module, parameters[-1 - depth] if parameters else None


def _checkpoint_error(where: str, problem: str) -> ConfigError:
    return ConfigError(f"{where}: {problem}", phase=PHASE, hint=_AGAIN)
