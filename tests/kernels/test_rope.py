"""`rope`: right, and the same for a token in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, random
from native_checks import NATIVE_DTYPES, native_rows, step_of

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.rope import cases, reference, rope
from octavo.kernels.rope.native import RopeArguments


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim", "num_pairs"), cases.HEADS)
def test_rope(num_heads: int, head_dim: int, num_pairs: int, dtype: torch.dtype) -> None:
    for rows in cases.ROWS:
        x = random(rows, num_heads, head_dim, dtype=dtype, seed=rows)
        angles = random(rows, num_pairs, seed=1, scale=100.0)
        cos, sin = angles.cos(), angles.sin()
        whole = rope(x, cos, sin)
        assert_close(whole, reference.rope(x, cos, sin), cases.TOLERANCES[dtype])
        for start, end in [(0, 1), (rows - 1, rows), (rows // 2, rows)]:
            assert torch.equal(rope(x[start:end].clone(), cos[start:end], sin[start:end]), whole[start:end])


def check_native_rope(
    library: NativeLibrary, rows: int, num_heads: int, head_dim: int, num_pairs: int, dtype: torch.dtype
) -> None:
    width = num_heads * head_dim
    x = random(rows, width, seed=rows)
    angles = random(rows, num_pairs, seed=1, scale=100.0)
    cos, sin = angles.cos(), angles.sin()

    def arguments(inputs, out):
        x, cos, sin = inputs
        return RopeArguments(x, out, cos, sin, head_dim)

    actual = native_rows(library, "rope", arguments, [x, cos, sin], width, dtype)
    expected = reference.rope(x.unflatten(1, (num_heads, head_dim)), cos, sin).flatten(1)
    assert_close(actual, expected.to(dtype), cases.TOLERANCES[dtype])
    if dtype == torch.float32:
        matrix = Matrix.of(x)
        in_place = RopeArguments(matrix, matrix, Matrix.of(cos), Matrix.of(sin), head_dim)
        run(library, "rope", in_place, step=step_of(rows), num_threads=2)
        assert torch.equal(x, actual)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim", "num_pairs"), cases.HEADS)
def test_native_rope(
    native_library: NativeLibrary, num_heads: int, head_dim: int, num_pairs: int, dtype: torch.dtype
) -> None:
    for rows in cases.ROWS:
        check_native_rope(native_library, rows, num_heads, head_dim, num_pairs, dtype)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    num_heads=st.integers(1, 4),
    num_pairs=st.integers(1, 70),
    num_more=st.sampled_from([0, 0, 1, 16, 40]),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_rope_of_any_shape(native_library: NativeLibrary, rows, num_heads, num_pairs, num_more, dtype) -> None:
    check_native_rope(native_library, rows, num_heads, 2 * num_pairs + num_more, num_pairs, dtype)


def test_rope_rejects_angles_that_do_not_fit() -> None:
    with pytest.raises(ShapeError):
        rope(random(2, 3, 8), random(2, 8), random(2, 8))
