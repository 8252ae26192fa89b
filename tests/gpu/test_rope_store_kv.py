"""`rope_store_kv` on a GPU: right, in every layout of its rows and caches, and the same for a token in any batch."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import assert_close
from pairwise import pairwise
from rotated_rows import StepRows, make_rows

from octavo.kernels.paged_attention import int8_cache
from octavo.kernels.rope_store_kv import cases, gpu, reference
from octavo.kernels.store_kv import gpu as store_gpu
from octavo.kernels.store_kv import reference as store_reference

DTYPES = list(cases.TOLERANCES)


def on_device(rows: StepRows, device: torch.device, *, heads_are_outside: bool) -> StepRows:
    """Return the rows where the kernel runs; the caches with the slots of a head side by side, if asked for."""
    moved = rows.to(device)
    if heads_are_outside:
        moved.cache = moved.cache.transpose(2, 3).contiguous().transpose(2, 3)
    return moved


@pytest.mark.parametrize(("heads", "dtype", "has_norm"), pairwise(cases.HEADS, DTYPES, [False, True]), ids=str)
def test_rope_store_kv(
    device: torch.device, seed: int, heads: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool
) -> None:
    heads_are_outside = not has_norm
    for num_rows, block_size in zip(cases.ROWS, cases.BLOCK_SIZES, strict=False):
        rows = make_rows(num_rows, heads, dtype, block_size=block_size, has_norm=has_norm, seed=seed)
        moved = on_device(rows, device, heads_are_outside=heads_are_outside)
        q = gpu.rope_store_kv(*moved.arguments()).cpu()
        assert_close(q, reference.rope_store_kv(*rows.arguments()), cases.TOLERANCES[dtype])
        assert_close(moved.cache.cpu(), rows.cache, cases.TOLERANCES[dtype])
        assert torch.equal(moved.cache[1].cpu(), rows.cache[1]), "values are copied"


def test_8_bits_are_those_of_the_parts(device: torch.device, seed: int) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8_e4m3fn")
    rows = make_rows(5, (4, 2, 80, 24), torch.bfloat16, block_size=16, has_norm=True, seed=seed).to(device)
    q = gpu.rope_store_kv(*rows.arguments())
    (_, _, v), k = rows.qkv, rows.cache[0].flatten(0, 1)[rows.slots]
    expected = torch.zeros(rows.cache.shape, dtype=torch.float8_e4m3fn, device=device)
    store_gpu.store_kv(k, v, expected[0], expected[1], rows.slots, 0.1, 0.02)
    rows.cache = torch.zeros_like(expected)
    assert torch.equal(gpu.rope_store_kv(*rows.arguments(), 0.1, 0.02), q)
    assert torch.equal(rows.cache.view(torch.uint8), expected.view(torch.uint8))
    assert bool(expected.float().any())


@pytest.mark.parametrize("heads", [(4, 2, 80, 24), (9, 3, 64, 32), (8, 4, 128, 64)], ids=str)
def test_integers_are_those_of_the_definition(
    device: torch.device, seed: int, heads: tuple[int, int, int, int]
) -> None:
    """Keys are rotated by the kernel, which rounds them like other dtypes, and then quantized."""
    rows = make_rows(5, heads, torch.bfloat16, block_size=16, has_norm=True, seed=seed).to(device)
    rows.qkv[2][3, 1, 7] = torch.nan
    q = gpu.rope_store_kv(*rows.arguments())
    (_, _, v), k = rows.qkv, rows.cache[0].flatten(0, 1)[rows.slots]
    memory = [int8_cache.empty_cache(*rows.cache.shape[1:], device).zero_() for _ in range(6)]
    k_rope, v_rope, k_store, v_store, k_wanted, v_wanted = (int8_cache.levels_of(each, 16) for each in memory)
    arguments = (*rows.qkv, rows.rotation, k_rope, v_rope, rows.slots)
    assert torch.equal(gpu.rope_store_kv(*arguments), q)
    store_gpu.store_kv(k, v, k_store, v_store, rows.slots)
    store_reference.store_kv(k, v, k_wanted, v_wanted, rows.slots)
    for found in (memory[:2], memory[2:4]):
        for each, wanted in zip(found, memory[4:], strict=True):
            scales, wanted_scales = (
                int8_cache.scales_of(int8_cache.levels_of(one, 16)).nan_to_num(-1.0) for one in (each, wanted)
            )
            assert torch.equal(scales, wanted_scales)
            is_finite = (wanted_scales >= 0).expand(rows.cache.shape[1:])
            levels, wanted_levels = (int8_cache.levels_of(one, 16)[is_finite] for one in (each, wanted))
            assert torch.equal(levels, wanted_levels) and bool(levels.any())
    assert int(int8_cache.scales_of(v_rope).isnan().sum()) == 1


def test_rows_without_a_slot_are_rotated_and_not_stored(device: torch.device, seed: int) -> None:
    rows = make_rows(3, (4, 2, 64, 32), torch.bfloat16, block_size=16, has_norm=True, seed=seed).to(device)
    before = rows.cache.clone()
    rows.slots[:] = -1
    q = gpu.rope_store_kv(*rows.arguments())
    assert bool(q.isfinite().all())
    assert torch.equal(rows.cache, before)


def test_rows_do_not_depend_on_the_batch(device: torch.device, seed: int) -> None:
    whole = make_rows(12, (9, 3, 64, 32), torch.bfloat16, block_size=16, has_norm=True, seed=seed).to(device)
    q = gpu.rope_store_kv(*whole.arguments())
    for start, end in [(0, 1), (11, 12), (3, 9)]:
        part = whole.part(start, end)
        part.cache.fill_(0)
        assert torch.equal(gpu.rope_store_kv(*part.arguments()), q[start:end])
        stored = part.cache.flatten(1, 2)[:, part.slots]
        assert torch.equal(stored, whole.cache.flatten(1, 2)[:, part.slots])


def test_heads_do_not_depend_on_how_many_a_rank_has(device: torch.device, seed: int) -> None:
    whole = make_rows(5, (8, 4, 64, 32), torch.bfloat16, block_size=16, has_norm=True, seed=seed).to(device)
    out = gpu.rope_store_kv(*whole.arguments())
    (q, k, v), keys = whole.qkv, whole.cache[:, :, :, 1:2].contiguous()
    part = replace(whole, qkv=(q[:, 2:4].clone(), k[:, 1:2].clone(), v[:, 1:2].clone()), cache=torch.zeros_like(keys))
    assert torch.equal(gpu.rope_store_kv(*part.arguments()), out[:, 2:4])
    assert torch.equal(part.cache.flatten(1, 2)[:, part.slots], keys.flatten(1, 2)[:, part.slots])


def test_no_rows(device: torch.device) -> None:
    rows = make_rows(1, (4, 2, 64, 32), torch.bfloat16, block_size=16, has_norm=False, seed=0).to(device).part(0, 0)
    assert gpu.rope_store_kv(*rows.arguments()).shape == (0, 4, 64)
