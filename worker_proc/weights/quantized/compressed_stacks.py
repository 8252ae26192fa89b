"""Stacks of experts in compressed-tensors: the tensors of all experts of a layer, with the experts as first dimension.

They have one of two spellings:

experts.gate_up_proj.weight_packed  of a module that owns the stack, as llm-compressor packs experts again
experts.gate_up_proj_packed         of a parameter; unpacked levels are `experts.gate_up_proj` itself

Experts may share one scale, and one order of inputs. Every other tensor has a slice for each expert.
"""

import re
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.parallel.sharding import Shard
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, StoredStack

_STACK = re.compile(r"(^|\.)experts\.[A-Za-z_][A-Za-z0-9_]*$")
"""Name of a stack. Experts with tensors of their own have an index in its place."""


def places_in_stacks(names: Collection[str], parts: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the stack and the part of each tensor of a quantized stack; see `StackFormat.places_in_stacks`.

    Args:
        names: names of all tensors of the checkpoint.
        parts: all name suffixes of a layer's tensors.
    """
    spellings = {f"_{part.removeprefix('weight_')}": part for part in parts if part.startswith("weight_")}
    spellings |= {f"_{part}": part for part in parts if part.startswith("input_")}
    marked = {name.removesuffix(end) for name in names for end in ("_packed", "_scale") if name.endswith(end)}
    places: dict[str, tuple[str, str]] = {}
    for stack in filter(_STACK.search, marked):
        if stack in names or f"{stack}_packed" in names:
            own = {stack: "weight"} | {f"{stack}{end}": part for end, part in spellings.items()}
            places |= {name: (stack, part) for name, part in own.items() if name in names}
    for name in names:
        layer, _, part = name.rpartition(".")
        if part in parts and _STACK.search(layer):
            places[name] = (layer, part)
    return places


def stack_of(
    name: str, tensors: Mapping[str, Tensor], matrix: Callable[[str, Mapping[str, Tensor]], StoredMatrix]
) -> StoredStack:
    """Return the matrices of all experts of a layer.

    Args:
        name: name of the stack.
        tensors: tensors by part.
        matrix: makes a matrix from a layer's name and its tensors.

    Raises:
        ConfigError: a tensor has another number of experts or dimensions.
    """
    weight = tensors.get("weight_packed", tensors.get("weight"))
    if weight is None or weight.ndim != 3:
        raise _shape_error(name, tensors)
    num_experts = len(weight)
    each = [_of_expert(name, tensors, expert, num_experts) for expert in range(num_experts)]
    shape = matrix(name, each[0]).shape

    def cut(expert: int, num_parts: int) -> list[StoredMatrix]:
        whole, size = matrix(f"{name}[{expert}]", each[expert]), shape[0] // num_parts
        ranges = [range(size * part, size * (part + 1)) for part in range(num_parts)]
        return [whole.part(Shard(0, shape[0], (rows,))) for rows in ranges]

    return StoredStack(name, num_experts, shape, cut)


def _of_expert(name: str, tensors: Mapping[str, Tensor], expert: int, num_experts: int) -> dict[str, Tensor]:
    """Return the tensors of one expert, by part."""
    own = {}
    for part, tensor in tensors.items():
        if part == "weight_shape":  # of the stack, or one row per expert
            own[part] = (tensor[expert] if tensor.ndim == 2 else tensor)[-2:]
        elif tensor.numel() == 1 or (part == "weight_g_idx" and tensor.ndim == 1):
            own[part] = tensor
        elif len(tensor) == num_experts:
            own[part] = tensor[expert]
        else:
            raise _shape_error(name, tensors)
    return own


def _shape_error(name: str, tensors: Mapping[str, Tensor]) -> ConfigError:
    found = ", ".join(f"{part} {tensor.dtype} {tuple(tensor.shape)}" for part, tensor in tensors.items())
    return ConfigError(
        f"{name!r} is no stack of quantized experts with scales for each: {found}",
        hint="use a checkpoint whose experts have tensors of their own (experts.0.gate_proj.weight, ...)",
    )
