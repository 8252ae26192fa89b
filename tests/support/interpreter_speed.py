"""Triton's interpreter without the work that it repeats for every operation of a kernel: a third of its time remains.

It computes the same values and makes the same checks. Most of the time of tests/gpu was spent on descriptions of
tensors, not on numbers. The functions replaced are those of Triton 3.6.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle


def accelerate() -> None:
    """Make the interpreter of this process faster. Its other patches must be in place."""
    _patch_language_for_good()
    _share_shapes()
    TritonSemantic.broadcast_impl_value = _broadcast
    # Computes whether a result overflows, for an assertion that the interpreter never makes.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None
    numpy_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: numpy_dtype(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)


def _patch_language_for_good() -> None:
    """Give `triton.language` its interpreted form once, not at every call of every device function."""
    scope = interpreter._LangPatchScope()
    for language in (tl, tl.core):
        interpreter._patch_lang_tensor(language.tensor, scope)
        interpreter._patch_lang_core(language, scope)
        interpreter._patch_builtin(language, interpreter.interpreter_builder, scope)
    for members in (tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        interpreter._patch_builtin(members, interpreter.interpreter_builder, scope)
    interpreter._patch_lang = lambda kernel: interpreter._LangPatchScope()


class Shape(NamedTuple):
    """What Triton derives from the sizes of a tensor, for its type and for its value."""

    of_type: tl.tuple
    of_value: tl.tuple
    numel: int
    """The product of the sizes."""
    constant_numel: tl.constexpr
    text: str


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
        described = _shape(*(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        self.shape, self.numel = described.of_type, described.numel
        self.name = f"<{described.text}, {element_ty}>"

    def initialize_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
        described = _shape(*(type.shape.values if type.is_block() else ()))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = described.of_value, described.constant_numel

    tl.block_type.__init__ = initialize_type
    tl.tensor.__init__ = initialize_tensor
    tl.tuple.__eq__ = lambda self, other: tl.constexpr(True) if self is other else is_equal(self, other)


_broadcast_unequal = TritonSemantic.broadcast_impl_value


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast_unequal(self, lhs, rhs)
