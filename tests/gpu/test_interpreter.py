"""Triton's interpreter: wrong without our patch, right with it."""

import pytest
import torch
import triton
import triton.language as tl
import triton_interpreter
from kernel_checks import random
from triton.runtime.interpreter import InterpreterBuilder


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(out_ptr + offsets, x + y)
    tl.store(out_ptr + BLOCK + offsets, x * y)
    tl.store(out_ptr + 2 * BLOCK + offsets, tl.where(x < y, x, y))
    tl.store(out_ptr + 3 * BLOCK + offsets, (x.to(tl.float32) * 1.1).to(out_ptr.dtype.element_ty))
    tl.store(out_ptr + 4 * BLOCK + offsets, x.to(tl.float16).to(out_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    a, b = tl.load(a_ptr + rows * BLOCK + columns), tl.load(b_ptr + rows * BLOCK + columns)
    tl.store(out_ptr + rows * BLOCK + columns, tl.dot(a, b))


@triton.jit
def _loop_kernel(count_ptr, out_ptr):
    total = 0
    for index in range(tl.load(count_ptr)):
        total += index
    tl.store(out_ptr, total)


@triton.jit
def _unequal_shapes_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 8), tl.arange(0, 8) + tl.arange(0, 16))


def arithmetic(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(5, 64, dtype=torch.bfloat16, device=x.device)
    _arithmetic_kernel[(1,)](x, y, out, BLOCK=64)
    return out


def expected_arithmetic(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([x + y, x * y, torch.minimum(x, y), (x.float() * 1.1).bfloat16(), x.half().bfloat16()])


def test_bfloat16_arithmetic_rounds_as_torch_does(device: torch.device, seed: int) -> None:
    x, y = random(2, 64, dtype=torch.bfloat16, seed=seed).to(device)
    assert torch.equal(arithmetic(x, y), expected_arithmetic(x, y))


def test_bfloat16_products_of_matrices(device: torch.device, seed: int) -> None:
    a, b = random(2, 32, 32, dtype=torch.bfloat16, seed=seed).to(device)
    out = torch.empty(32, 32, device=device)
    _dot_kernel[(1,)](a, b, out, BLOCK=32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


def test_loops_over_loaded_bounds(device: torch.device) -> None:
    out = torch.empty(1, dtype=torch.int32, device=device)
    _loop_kernel[(1,)](torch.tensor([5], dtype=torch.int32, device=device), out)
    assert out.item() == 10


@pytest.mark.skipif(not triton_interpreter.IS_INTERPRETING, reason="about the interpreter")
def test_shapes_are_checked() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="incompatible dimensions at index 0: 8 and 16"):
        _unequal_shapes_kernel[(1,)](torch.empty(8))


@pytest.mark.skipif(not triton_interpreter.IS_INTERPRETING, reason="about the interpreter")
def test_the_repair_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, a newer Triton may do without `triton_interpreter.repair`."""
    x, y = random(2, 64, dtype=torch.bfloat16)
    for name, method in triton_interpreter.UNREPAIRED.items():
        monkeypatch.setattr(InterpreterBuilder, name, method)
    is_right = (arithmetic(x, y) == expected_arithmetic(x, y)).all(dim=1)
    assert not is_right[:4].any()
    a = random(32, 32, dtype=torch.bfloat16)
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](a, a, out, BLOCK=32)
    assert not torch.allclose(out, a.float() @ a.float(), rtol=0.1, atol=0.1)
