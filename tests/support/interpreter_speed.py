"""Speeds up Triton's interpreter by not repeating work for every operation of a kernel: it takes a quarter of the time.

It computes the same values and makes the same checks. Most of the time of tests/gpu was spent on descriptions of
tensors, not on numbers. The replaced functions are those of Triton 3.6.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle


def accelerate() -> None:
    """Make the interpreter of this process faster. Its other patches must be in place."""
    _compare_types_by_name()
    _patch_language_for_good()
    _share_shapes()
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _check_operands
    # Computes whether a result overflows, for an assertion that the interpreter never makes.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None
    interpreter._validate_np_data_size = _has_size_of


_unwrap_unknown = tl.core._unwrap_if_constexpr
_PLAIN = frozenset({bool, int, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type, tl.tensor})


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap_unknown(value)


def _compare_types_by_name() -> None:
    """Compare and look up scalar types by their names, without hashes and chains of `isinstance`."""

    def is_equal(self: tl.dtype, other: object) -> bool:
        if self is other:
            return True
        other = _unwrap(other)
        return isinstance(other, tl.dtype) and self.name == other.name

    original, by_name = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        scalar = dtype.scalar
        found = by_name.get(scalar.name)
        if found is None:
            found = by_name[scalar.name] = original(scalar)
        return found

    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrap
    tl.dtype.__eq__ = is_equal
    interpreter._get_np_dtype = numpy_dtype


def _has_size_of(data: Any, dtype: tl.dtype) -> bool:
    return data.itemsize == 1 or dtype.is_ptr() or data.itemsize * 8 <= dtype.primitive_bitwidth


def _patch_attribute(
    owner: object, name: str, member: Callable[..., Any], builder: Any, scope: interpreter._LangPatchScope
) -> None:
    """Replace a builtin by a call of the function behind it: what is between only checks that `_semantic` is given."""
    semantic = TritonSemantic(builder)
    function = member
    while tl.core.is_builtin(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _patch_language_for_good() -> None:
    """Give `triton.language` its interpreted form once, instead of at every call of every device function."""
    interpreter._patch_attr = _patch_attribute
    scope = interpreter._LangPatchScope()
    for language in (tl, tl.core):
        interpreter._patch_lang_tensor(language.tensor, scope)
        interpreter._patch_lang_core(language, scope)
        interpreter._patch_builtin(language, interpreter.interpreter_builder, scope)
    for members in (tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        interpreter._patch_builtin(members, interpreter.interpreter_builder, scope)
    interpreter._patch_lang = lambda kernel: interpreter._LangPatchScope()


class Shape(NamedTuple):
    """Values that Triton derives from the sizes of a tensor, for its type and for its value."""

    of_type: tl.tuple
    of_value: tl.tuple
    numel: int
    """The product of the sizes."""
    constant_numel: tl.constexpr
    text: str


_SCALAR = Shape(tl.tuple(()), tl.tuple(()), 1, tl.constexpr(1), "")


@functools.cache
def _shape(*sizes: int) -> Shape:
    values = tl.tuple(sizes)
    numel = validate_block_shape(values) if sizes else 1
    constants = tl.tuple([tl.constexpr(size) for size in sizes])
    return Shape(values, constants, numel, tl.constexpr(math.prod(sizes)), str(values))


def _share_shapes() -> None:
    """Build each shape once, instead of once for every intermediate result. Equal shapes are then one object."""
    is_equal: Callable[[tl.tuple, Any], tl.constexpr] = tl.tuple.__eq__

    def initialize_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]) -> None:
        if not len(shape):
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.described = described = _shape(*(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        self.shape, self.numel = described.of_type, described.numel
        self.name = f"<{described.text}, {element_ty.name}>"

    def initialize_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
        described = type.described
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = described.of_value, described.constant_numel

    tl.dtype.described = _SCALAR
    tl.block_type.__init__ = initialize_type
    tl.tensor.__init__ = initialize_tensor
    tl.tuple.__eq__ = lambda self, other: tl.constexpr(True) if self is other else is_equal(self, other)


_broadcast_unequal = TritonSemantic.broadcast_impl_value


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast_unequal(self, lhs, rhs)


_check_unequal = TritonSemantic.binary_op_type_checking_impl


def _check_operands(
    self: TritonSemantic,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the operands as tensors of one type and shape. Those of one scalar type need no conversion."""
    are_alike = type(lhs) is type(rhs) is tl.tensor and lhs.dtype.name == rhs.dtype.name
    if are_alike and not div_or_mod and not lhs.dtype.is_ptr():
        return _broadcast(self, lhs, rhs)
    return _check_unequal(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
