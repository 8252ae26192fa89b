"""Triton's interpreter with its bfloat16 repaired, so that kernels can be tested without a GPU.

The interpreter runs kernels with numpy, which has no bfloat16: it stores such numbers as bits in uint16. In Triton 3.6
this has three silent bugs: matrix products and all other arithmetic treat the bits as integers, and conversions from
float32 truncate where a GPU rounds to nearest. With numpy 2.4, a loop over a bound loaded from memory raises a
TypeError, and a comparison of two scalar floats that is then broadcast to a block becomes a float. Conversions to
float8_e4m3fn round differently from a GPU and lose NaN. `repair` fixes all of these.

What it cannot show: shared memory, races between programs (they run one after another), reads out of bounds.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from interpreter_speed import accelerate
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""True in a process whose kernels run in the interpreter; Triton decides it when a kernel is defined."""

_INSTRUCTION_INPUTS = 16
"""Inputs that a tensor core instruction multiplies and adds up if they have 16 bits."""

UNREPAIRED: dict[str, Callable[..., Any]] = {
    name: getattr(InterpreterBuilder, name)
    for name in ("binary_op", "unary_op", "create_dot", "create_fma", "create_fp_to_fp", "cast_impl")
}
"""The original methods of the builder."""


def repair() -> None:
    """Repair the interpreter in this process."""
    InterpreterBuilder.binary_op = _binary_op
    InterpreterBuilder.unary_op = _unary_op
    InterpreterBuilder.create_dot = _create_dot
    InterpreterBuilder.create_fma = _create_fma
    InterpreterBuilder.create_fp_to_fp = _fp_to_fp
    InterpreterBuilder.cast_impl = _cast_impl
    interpreter._patch_lang_tensor = _patch_lang_tensor
    accelerate()


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.name == "bf16"


def _widen(handle: TensorHandle) -> TensorHandle:
    """Return float32 numbers for bfloat16 ones, which are their upper halves; others as they are."""
    if not _is_bf16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _narrow(handle: TensorHandle) -> TensorHandle:
    """Round float32 numbers to bfloat16: to nearest, ties to even."""
    bits = np.ascontiguousarray(handle.data, dtype=np.float32).view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)).astype(np.uint16)
    quiet_nan = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    halves = np.where(np.isnan(handle.data), quiet_nan, rounded)
    return TensorHandle(halves.reshape(handle.data.shape), tl.bfloat16)


def _in_float32(operation: str, builder: InterpreterBuilder, operands: list[TensorHandle], *others: Any) -> Any:
    """Run an unrepaired operation on float32 operands, and round what it returns if there was a bfloat16 one."""
    has_bf16 = any(map(_is_bf16, operands))
    result = UNREPAIRED[operation](builder, *(map(_widen, operands) if has_bf16 else operands), *others)
    if result.data.dtype == np.bool_:
        return TensorHandle(result.data, tl.int1)
    if has_bf16 and result.data.dtype == np.float32:
        return _narrow(result)
    return result


def _binary_op(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
    return _in_float32("binary_op", self, [lhs, rhs], op)


def _unary_op(self: InterpreterBuilder, arg: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
    return _in_float32("unary_op", self, [arg], op)


def _create_fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    return _in_float32("create_fma", self, [x, y, z])


def _create_dot(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any
) -> TensorHandle:
    a, b = _widen(a), _widen(b)
    if d.dtype.scalar != tl.float32 or a.data.dtype.kind != "f" or b.data.dtype.kind != "f":
        return UNREPAIRED["create_dot"](self, a, b, d, *precision)
    # One sum for each tensor core instruction, in ascending order, so two products in a chain have the bits of one
    # product of all inputs. In float64, because numpy's order of summation depends on the shape; a GPU's does not.
    left, right, sums = a.data.astype(np.float64), b.data.astype(np.float64), d.data
    for first in range(0, left.shape[-1], _INSTRUCTION_INPUTS):
        inputs = slice(first, first + _INSTRUCTION_INPUTS)
        sums = (np.matmul(left[..., inputs], right[..., inputs, :]) + sums).astype(np.float32)
    return TensorHandle(sums, tl.float32)


def _fp_to_fp(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype, rounding: Any) -> TensorHandle:
    """Convert to and from float8_e4m3fn, NaN included. Kernels themselves must clamp values that are too large."""
    if dst_type.scalar == tl.float8e4nv:
        wide = torch.from_numpy(np.ascontiguousarray(_widen(src).data, dtype=np.float32))
        return TensorHandle(wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), tl.float8e4nv)
    if src.dtype.scalar == tl.float8e4nv:
        narrow = torch.from_numpy(np.ascontiguousarray(src.data)).view(torch.float8_e4m3fn)
        return _cast_impl(self, TensorHandle(narrow.float().numpy(), tl.float32), dst_type)
    return UNREPAIRED["create_fp_to_fp"](self, src, dst_type, rounding)


def _cast_impl(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    original = UNREPAIRED["cast_impl"]
    if dst_type.scalar == tl.bfloat16 and not _is_bf16(src):
        return _narrow(src if src.dtype.scalar == tl.float32 else original(self, src, tl.float32))
    if _is_bf16(src) and dst_type.scalar != tl.bfloat16:
        wide = _widen(src)
        return wide if dst_type.scalar == tl.float32 else original(self, wide, dst_type)
    return original(self, src, dst_type)


_patch_unrepaired = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: type, scope: Any) -> None:
    _patch_unrepaired(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
