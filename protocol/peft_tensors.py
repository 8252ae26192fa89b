"""Tensors of LoRA adapters in PEFT's format: where each one belongs, judged by names, types and shapes alone.

Frontends check the header of a file with it, workers the tensors.
"""

from collections.abc import Mapping
from typing import NamedTuple

from octavo.protocol.errors import ConfigError
from octavo.protocol.peft_lora import AGAIN, Factor, PeftLora, module_of


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """Its type, as the file or torch calls it."""
    is_float: bool
    shape: tuple[int, ...]


class FactorPlace(NamedTuple):
    """Where a tensor of an adapter belongs."""

    module: str
    """Name of the module in the base model; for a stack of experts' weights, name of the parameter."""
    factor: Factor
    rank: int = 0
    """Rank of the module. 0 for a weight of the base model that the file repeats."""
    scale: float = 0.0
    """Factor by which B times A is scaled."""
    is_stack: bool = False
    """Whether the tensor holds the factors of all experts: A has all ranks of an expert after those of the previous
    expert; B has all experts of each rank."""


def places_of(tensors: Mapping[str, StoredTensor], config: PeftLora, where: str) -> dict[str, FactorPlace]:
    """Return the place of each tensor of an adapter.

    Args:
        tensors: the tensors by name.
        config: configuration of the adapter.
        where: path of the file, for errors.

    Raises:
        ConfigError: a tensor is not supported, has another type or rank than it should, or has no counterpart.
    """
    places: dict[str, FactorPlace] = {}
    for name, tensor in tensors.items():
        module, factor = module_of(name, where)
        if factor == "base":
            places[name] = FactorPlace(module, factor)
            continue
        if not tensor.is_float or len(tensor.shape) != 2:
            raise checkpoint_error(where, f"{name!r} has type {tensor.dtype} and shape {tensor.shape}")
        module, parameter = _parameter_of(module, config, name, where)
        if parameter is None and not config.targets(module):
            raise checkpoint_error(where, f"{name!r} belongs to a module that target_modules does not name")
        key = module if parameter is None else f"{module}.{parameter}"
        is_stack = parameter not in (None, "weight")
        rank, length = config.rank_of(key), tensor.shape[0 if factor[-1] == "A" else 1]
        if length % rank if is_stack else length != rank:
            raise checkpoint_error(
                where, f"{name!r} has shape {tensor.shape}, and adapter_config.json gives it the rank {rank}"
            )
        places[name] = FactorPlace(key if is_stack else module, factor, rank, config.scale_of(key), is_stack)
    _require_pairs(places, tensors, where)
    return places


def checkpoint_error(where: str, problem: str) -> ConfigError:
    """Return the error for a file that PEFT would not have written."""
    return ConfigError(f"{where}: {problem}", hint=AGAIN)


def _parameter_of(module: str, config: PeftLora, name: str, where: str) -> tuple[str, str | None]:
    """Return the module without PEFT's wrappers, and which of its parameters is changed; `None` for a layer.

    The wrapper of each parameter of a module encloses the wrappers of the parameters before it.
    """
    depth = 0
    while module.endswith(".base_layer"):
        module, depth = module.removesuffix(".base_layer"), depth + 1
    parameters = config.parameters_of(module)
    if depth >= max(1, len(parameters)):
        raise checkpoint_error(where, f"{name!r} belongs to a parameter that target_parameters does not name")
    return module, parameters[-1 - depth] if parameters else None


def _require_pairs(places: Mapping[str, FactorPlace], tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Check that each module has both factors, of the same kind and number of experts."""
    found: dict[str, dict[str, int]] = {}
    for name, place in places.items():
        if place.factor != "base":
            length = tensors[name].shape[0 if place.factor[-1] == "A" else 1]
            found.setdefault(place.module, {})[place.factor] = length // place.rank
    if not found:
        raise checkpoint_error(where, "it changes nothing")
    for module, factors in found.items():
        if factors.keys() not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise checkpoint_error(where, f"{module!r} has only one of its two factors")
        (_, a), (_, b) = sorted(factors.items())
        if a != b:
            raise checkpoint_error(where, f"{module!r} has an A of {a} experts, and a B of {b}")
