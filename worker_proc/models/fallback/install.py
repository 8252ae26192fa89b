"""Puts our tensors and products into the modules of a model of `transformers`, under the names of its checkpoint."""

from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import Values
from octavo.worker_proc.models.fallback.configuration import refusal
from octavo.worker_proc.models.fallback.probe import Structure
from octavo.worker_proc.models.fallback.weights import PackedExperts, PackedParameter, ProbedWeight, Product
from octavo.worker_proc.models.linear_weight import LinearWeight
from octavo.worker_proc.models.parameters import Parameters

_EXPERT_PRODUCTS = {"product"}, {"transposed product"}

Multiply = Callable[[LinearWeight, bool], Product]
"""Makes the product of a weight. The flag says whether its inputs are the rows of the step."""


def install(
    facts: ModelFacts, model: PreTrainedModel, structure: Structure, parameters: Parameters, multiply: Multiply
) -> None:
    """Replace every stand-in of a model by a tensor, or by a weight that is used only in products.

    Args:
        facts: facts of the model.
        model: model whose parameters are stand-ins.
        structure: how they were used.
        parameters: creates tensors and weights.
        multiply: returns the product with a weight.

    Raises:
        ConfigError: a parameter has more than two dimensions.
    """
    names = {id(weight): name for name, weight in structure.weights.items()}
    packed = {
        id(weight): is_transposed
        for weight in structure.weights.values()
        if (is_transposed := _packed_order(weight, names, parameters.dtype)) is not None
    }
    made: dict[int, Tensor] = {}
    for weight in structure.weights.values():
        key, name = id(weight), names[id(weight)]
        if weight.ndim == 3 and weight.uses == {"experts"} and weight.expert_uses in _EXPERT_PRODUCTS:
            made[key] = _experts(name, weight, parameters, multiply)
        elif weight.ndim > 2:
            raise refusal(facts, f"the parameter {name} of {weight.ndim} dimensions is not multiplied expert by expert")
        elif key in packed and "table" in weight.uses:
            table_VD = parameters.new(name, *weight.shape)
            product = multiply(parameters.tied(table_VD), True)
            made[key] = PackedParameter.of(weight.shape, weight.dtype, product, table_VD=table_VD)
        elif key in packed:
            made[key] = _packed(name.removesuffix(".weight"), weight, packed[key], parameters, multiply)
        elif any(key == id(owner.bias) and "table" not in owner.uses for owner in _owners(structure, packed)):
            made[key] = torch.empty(0, dtype=weight.dtype)  # the packed weight has the bias
        else:
            made[key] = parameters.new(name, *weight.shape, dtype=weight.dtype)
    _replace(model, made, parameters)


def _owners(structure: Structure, packed: Container[int]) -> list[ProbedWeight]:
    return [weight for weight in structure.weights.values() if id(weight) in packed]


def _packed_order(weight: ProbedWeight, names: dict[int, str], dtype: torch.dtype) -> bool | None:
    """Return whether a weight that can be packed is stored with its outputs last; `None` if it cannot be packed."""
    layer, _, kind = names[id(weight)].rpartition(".")
    kinds = weight.uses & {"product", "transposed product"}
    has_own_bias = weight.bias is None or names.get(id(weight.bias)) == f"{layer}.bias"
    if len(kinds) != 1 or "tensor" in weight.uses or kind != "weight" or not has_own_bias or weight.dtype != dtype:
        return None
    is_transposed = "transposed product" in kinds
    return None if is_transposed and "table" in weight.uses else is_transposed


def _packed(
    layer: str, weight: ProbedWeight, is_transposed: bool, parameters: Parameters, multiply: Multiply
) -> PackedParameter:
    num_inputs, num_outputs = weight.shape if is_transposed else reversed(weight.shape)
    has_bias = weight.bias is not None
    linear = parameters.linear(layer, {layer: num_outputs}, num_inputs, bias=has_bias, is_transposed=is_transposed)
    return PackedParameter.of(weight.shape, weight.dtype, multiply(linear, True), has_bias=has_bias)


def _experts(name: str, weight: ProbedWeight, parameters: Parameters, multiply: Multiply) -> PackedExperts:
    """Make a linear weight for each expert, filled from a part of the tensor of all."""
    num_experts, *shape = weight.shape
    is_transposed = "transposed product" in weight.expert_uses
    num_inputs, num_outputs = shape if is_transposed else reversed(shape)
    layers = [f"{name}.{expert}" for expert in range(num_experts)]

    def split(_: str, values: Values) -> Iterator[tuple[str, Values]]:
        if tuple(values.shape) != tuple(weight.shape) or not isinstance(values, Tensor):
            raise ConfigError(f"{name!r} has shape {tuple(values.shape)} in the checkpoint, not {tuple(weight.shape)}")
        for layer, matrix in zip(layers, values.unbind(), strict=True):
            yield f"{layer}.weight", matrix

    parameters.names.add_split([name], split, [f"{layer}.weight" for layer in layers])
    linears = [
        parameters.linear(layer, {layer: num_outputs}, num_inputs, bias=False, is_transposed=is_transposed)
        for layer in layers
    ]
    return PackedExperts.of(
        weight.shape,
        [PackedParameter.of(torch.Size(shape), weight.dtype, multiply(linear, False)) for linear in linears],
    )


def _replace(model: PreTrainedModel, made: dict[int, Tensor], parameters: Parameters) -> None:
    """Put the tensors into the modules, also for the buffers that are in checkpoints."""
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, ProbedWeight):
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = parameters.new(f"{module_name}.{name}", *buffer.shape, dtype=buffer.dtype)
