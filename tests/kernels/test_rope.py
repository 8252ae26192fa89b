"""`rope`: right, and the same for a token in any batch."""

import pytest
import torch
from kernel_checks import assert_close, random

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.rope import cases, reference, rope


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim"), cases.HEADS)
def test_rope(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for rows in cases.ROWS:
        x = random(rows, num_heads, head_dim, dtype=dtype, seed=rows)
        angles = random(rows, head_dim // 2, seed=1, scale=100.0)
        cos, sin = angles.cos(), angles.sin()
        whole = rope(x, cos, sin)
        assert_close(whole, reference.rope(x, cos, sin), cases.TOLERANCES[dtype])
        for start, end in [(0, 1), (rows - 1, rows), (rows // 2, rows)]:
            assert torch.equal(rope(x[start:end].clone(), cos[start:end], sin[start:end]), whole[start:end])


def test_rope_refuses_angles_that_do_not_fit() -> None:
    with pytest.raises(ShapeError):
        rope(random(2, 3, 8), random(2, 8), random(2, 8))
