"""`rope_store_kv` through torch: right, and the same bits as its separate operations."""

import pytest
import torch
from kernel_checks import assert_close
from rotated_rows import make_rows

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.rope import rope
from octavo.kernels.rope_store_kv import cases, reference, rope_store_kv
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv import store_kv


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_rope_store_kv(heads: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool) -> None:
    for num_rows in cases.ROWS:
        rows = make_rows(num_rows, heads, dtype, block_size=16, has_norm=has_norm, seed=num_rows)
        expected_rows = rows.to(torch.device("cpu"))
        q = rope_store_kv(*rows.arguments())
        expected = reference.rope_store_kv(*expected_rows.arguments())
        assert_close(q, expected, cases.TOLERANCES[dtype])
        assert_close(rows.cache, expected_rows.cache, cases.TOLERANCES[dtype])


def test_the_bits_are_those_of_its_parts() -> None:
    rows = make_rows(7, (9, 3, 64, 32), torch.bfloat16, block_size=16, has_norm=True, seed=0)
    (q, k, v), rotation, norm = rows.qkv, rows.rotation, rows.rotation.norm
    assert norm is not None
    cache = rows.cache.clone()
    q, k = rms_norm(q, norm.q_weight_H, norm.eps), rms_norm(k, norm.k_weight_H, norm.eps)
    q, k = rope(q, rotation.cos_TC, rotation.sin_TC), rope(k, rotation.cos_TC, rotation.sin_TC)
    store_kv(k, v, cache[0], cache[1], rows.slots)
    assert torch.equal(rope_store_kv(*rows.arguments()), q)
    assert torch.equal(rows.cache, cache)


def test_it_rejects_what_does_not_go_together() -> None:
    rows = make_rows(2, (4, 2, 8, 4), torch.float32, block_size=16, has_norm=True, seed=0)
    q, k, v, rotation, k_cache, v_cache, slots = rows.arguments()
    with pytest.raises(ShapeError, match="for a cache"):
        rope_store_kv(q, k, v.bfloat16(), rotation, k_cache, v_cache, slots)
    with pytest.raises(ShapeError, match="one slot per row"):
        rope_store_kv(q, k, v, rotation, k_cache, v_cache, slots[:1])
    with pytest.raises(ShapeError, match="angles"):
        rope_store_kv(q, k, v, Rotation(rotation.cos_TC[:, :3], rotation.sin_TC[:, :2]), k_cache, v_cache, slots)
