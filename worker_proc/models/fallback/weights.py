"""Weights of `transformers` modules whose products are ours: tensors without memory that stand in their places.

Modules call `torch.nn.functional.linear` or `torch.addmm` with them, in whatever class, and torch hands the call over.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]

_NAMES = {
    functional.linear: ("input", "weight", "bias"),
    torch.addmm: ("bias", "input", "weight"),
    torch.matmul: ("input", "weight"),
    Tensor.matmul: ("input", "weight"),  # also the operator
}
"""Arguments of the products by position."""


def _operands(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the input, the weight and the bias of a product."""
    given = dict(zip(_NAMES[function], args, strict=False)) | (kwargs or {})
    return given.get("input"), given.get("weight"), given.get("bias")


class ProbedWeight(Tensor):
    """A weight of zeros, backed by a single number, that records how it is used."""

    uses: set[str]
    """"product", "transposed product" (outputs last), "table", "bias"; "tensor": anything else."""
    bias: Any
    """Bias of its products."""
    lookups: list[Tensor]
    """The rows that were looked up, by each call."""
    expert_uses: set[str]
    """Uses of the matrices of a three-dimensional weight, one matrix per expert."""

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype) -> "ProbedWeight":
        """Make the stand-in of a parameter."""
        weight: ProbedWeight = torch.zeros((), dtype=dtype).expand(shape).as_subclass(cls)
        weight.uses, weight.bias, weight.lookups, weight.expert_uses = set(), None, [], set()
        return weight

    def expert(self) -> "ProbedWeight":
        """Return the stand-in of one matrix. Its uses are recorded for all matrices."""
        weight = ProbedWeight.of(self.shape[1:], self.dtype)
        weight.uses = self.expert_uses
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the function; results are plain tensors."""
        if function in _NAMES and _is_matrix(_operands(function, args, kwargs)[1]):
            return _probed_product(function, *_operands(function, args, kwargs))
        if function is functional.embedding:
            ids, weight, *_ = args
            weight.uses.add("table")
            weight.lookups.append(ids)
            return torch.zeros(*ids.shape, weight.shape[1], dtype=weight.dtype)
        if function is Tensor.__getitem__ and args[0].ndim == 3 and _is_number(args[1]):
            args[0].uses.add("experts")
            return args[0].expert()
        if getattr(function, "__name__", "") != "__get__":  # getters compute nothing
            for operand in (*args, *(kwargs or {}).values()):
                _note(operand, "tensor")
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(Tensor) if isinstance(result, ProbedWeight) else result


def _probed_product(function: Any, x: Tensor, weight: ProbedWeight, bias_O: Any) -> Tensor:
    output_dim = 0 if function is functional.linear else 1
    if (
        not isinstance(x, ProbedWeight)
        and x.dtype == weight.dtype
        and (not weight.uses - {"table"} or weight.bias is bias_O)
    ):
        weight.bias = bias_O
        _note(weight, "transposed product" if output_dim else "product")
        _note(bias_O, "bias")
    else:
        for operand in (x, weight, bias_O):
            _note(operand, "tensor")
    return torch.zeros(*x.shape[:-1], weight.shape[output_dim], dtype=x.dtype)


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, ProbedWeight) and weight.ndim == 2


def _is_number(index: Any) -> bool:
    return isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0)


def _note(operand: Any, use: str) -> None:
    if isinstance(operand, ProbedWeight):
        operand.uses.add(use)


class WeightUseError(Exception):
    """Code of the model uses a packed weight otherwise than in the pass without weights; see `probe.py`."""


class PackedParameter(Tensor):
    """A weight that only products and lookups read; it has a shape and a type, but no memory."""

    product: Product
    has_bias: bool
    """Whether the product adds the bias."""
    table_VD: Tensor | None
    """The rows that lookups read."""

    @staticmethod
    def of(
        shape: torch.Size,
        dtype: torch.dtype,
        product: Product,
        *,
        has_bias: bool = False,
        table_VD: Tensor | None = None,
    ) -> "PackedParameter":
        """Make the stand-in of a weight.

        Args:
            shape: shape of the parameter.
            dtype: type of the parameter.
            product: multiplies the rows of a tensor of any shape with the weight.
            has_bias: whether the product adds the bias.
            table_VD: the rows, if they are looked up too.
        """
        weight: PackedParameter = torch.zeros((), dtype=dtype).expand(shape).as_subclass(PackedParameter)
        weight.product, weight.has_bias, weight.table_VD = product, has_bias, table_VD
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute products and lookups; getters work as for every tensor, and everything else raises."""
        if function in _NAMES:
            x, weight, bias_O = _operands(function, args, kwargs)
            out = weight.product(x)
            return out if weight.has_bias or bias_O is None else out + bias_O
        if function is functional.embedding:
            return functional.embedding(args[0], args[1].table_VD, *args[2:], **(kwargs or {}))
        if getattr(function, "__name__", "") != "__get__":
            raise WeightUseError(f"{function} with a packed weight, of which only products were seen")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class PackedExperts(Tensor):
    """The weights of all experts of a layer; it can only be indexed by the number of an expert."""

    experts: list[PackedParameter]

    @staticmethod
    def of(shape: torch.Size, experts: list[PackedParameter]) -> "PackedExperts":
        """Make the stand-in of a parameter of three dimensions, the first of which counts experts."""
        weight: PackedExperts = torch.zeros((), dtype=experts[0].dtype).expand(shape).as_subclass(PackedExperts)
        weight.experts = experts
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the weight of an expert; getters work as for every tensor, and everything else raises."""
        if function is Tensor.__getitem__ and _is_number(args[1]):
            return args[0].experts[int(args[1])]
        if getattr(function, "__name__", "") != "__get__":
            raise WeightUseError(f"{function} with the weights of experts, which were only seen one by one")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
