"""`store_kv` in C++: every row in its slot, the padding zero, not a byte of another slot touched."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from native_cache import NativeCache, numbers, read, scales

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import HUGE_PAGE_BYTES, SMALL_PAGE_BYTES
from octavo.kernels.paged_attention.layout import CacheLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


@settings(max_examples=30, deadline=None)
@given(
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 8, 12, 20, 33, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 5, 8, 16, 32]),
    num_rows=st.integers(1, 60),
    num_threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    first_slot=st.one_of(st.none(), st.sampled_from([0, 7, 16, 100])),
)
def test_store_kv(
    native_library: NativeLibrary,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_rows: int,
    num_threads: int,
    dtype: torch.dtype,
    first_slot: int | None,
) -> None:
    layout = CacheLayout(dtype, block_size, num_kv_heads, head_dim)
    scales_of = (0.25, 0.003) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
    cache = NativeCache(native_library, layout, 160 // block_size, num_threads, scales_of)
    # Rows cut from a wider matrix, as the program's are.
    width = num_kv_heads * head_dim
    k, v = random(num_rows, 2 * width + 3, seed=num_rows)[:, : 2 * width].split(width, dim=1)
    if first_slot is None:
        slots = torch.randperm(160, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
    else:  # of a prompt
        slots = torch.arange(first_slot, first_slot + num_rows)
    cache.store(k, v, slots)
    others = torch.ones(len(numbers(cache.k, layout, keys=True)), dtype=torch.bool)
    others[slots] = False
    for buffer, rows, keys, scale in ((cache.k, k, True, scales_of[0]), (cache.v, v, False, scales_of[1])):
        expected = rows.reshape(num_rows, num_kv_heads, head_dim)
        actual = read(buffer, layout, keys=keys)[slots]
        if dtype == torch.int8:
            largest = expected.abs().amax(dim=2)
            assert torch.equal(scales(buffer, layout)[slots], largest / 127)
            assert bool(((actual - expected).abs() <= largest.unsqueeze(2) / 253).all())
        elif dtype == torch.float8_e4m3fn:
            inverse = torch.tensor(1.0) / torch.tensor(scale)
            assert torch.equal(actual, (expected * inverse).clamp(-448, 448).to(dtype).float())
        else:
            assert torch.equal(actual, expected.to(dtype).float())
        stored = numbers(buffer, layout, keys=keys)
        assert not bool(stored[slots][..., head_dim:].float().any()), "padding"
        bits = stored.view(torch.int8) if dtype == torch.int8 else stored.view(torch.uint8)
        assert bool((bits[others] == (127 if dtype == torch.int8 else 0xFF)).all()), "another slot"  # 255 - 128
        if dtype == torch.int8:
            assert bool(scales(buffer, layout)[others].isnan().all()), "another slot's factor"


@pytest.mark.parametrize("first_slot", [16, 21])
def test_keys_and_values_may_be_bfloat16(native_library: NativeLibrary, first_slot: int) -> None:
    layout = CacheLayout(torch.bfloat16, 16, 3, 20)
    wide, narrow = NativeCache(native_library, layout, 4, 2), NativeCache(native_library, layout, 4, 2)
    k, v = random(40, 123, seed=1).bfloat16()[:, :120].split(60, dim=1)
    slots = torch.arange(first_slot, first_slot + 40)  # whole groups, and single rows
    wide.store(k.float(), v.float(), slots)
    narrow.store(k, v, slots)
    assert torch.equal(narrow.k, wide.k)
    assert torch.equal(narrow.v, wide.v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_zeros(native_library: NativeLibrary, dtype: torch.dtype) -> None:
    layout = CacheLayout(dtype, 16, 2, 12)
    cache = NativeCache(native_library, layout, 1)
    cache.store(torch.zeros(1, 24), torch.zeros(1, 24), torch.tensor([5]))
    assert not bool(read(cache.k, layout, keys=True)[5].any())
    assert not bool(read(cache.v, layout, keys=False)[5].any())


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_integers_hide_no_number_that_is_not_finite(native_library: NativeLibrary, fault: float) -> None:
    # In the last number of a head, behind the last whole vector; the other head and the other rows are as they were.
    layout = CacheLayout(torch.int8, 16, 2, 33)
    cache = NativeCache(native_library, layout, 1)
    k, v = random(2, 3, 66, seed=5)
    k[0, 32] = v[1, 65] = fault
    cache.store(k, v, torch.tensor([5, 6, 7]))
    of_keys, of_values = scales(cache.k, layout)[5:8].isnan(), scales(cache.v, layout)[5:8].isnan()
    # A value's fault is told in the factor of its key too, from which attention has it.
    assert of_keys.tolist() == [[True, False], [False, True], [False, False]]
    assert of_values.tolist() == [[False, False], [False, True], [False, False]]


def test_8_bit_floats_are_rounded_as_torch_rounds_them(native_library: NativeLibrary) -> None:
    # All numbers of the format, the middle between any two, the floats beside it, and what is too large or no number.
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    around = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (0.0, torch.inf)]
    beyond = torch.tensor([448.1, 460, 464, 465, 480, 1e5, 3e38, torch.inf, torch.nan, 1e-40, 1e-30])
    x = torch.cat([codes, middles, *around, beyond])
    x = torch.nn.functional.pad(x, (0, 576 - len(x)))
    layout = CacheLayout(torch.float8_e4m3fn, 16, 1, 576)
    cache = NativeCache(native_library, layout, 1)
    cache.store(x[None], -x[None], torch.tensor([3]))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(read(cache.k, layout, keys=True)[3, 0].nan_to_num(1e3), expected.float().nan_to_num(1e3))
    assert torch.equal(read(cache.v, layout, keys=False)[3, 0].nan_to_num(1e3), -expected.float().nan_to_num(-1e3))


def test_block_bytes_are_what_is_allocated() -> None:
    for dtype in DTYPES:
        for block_size in (1, 8, 16, 24, 32):
            layout = CacheLayout(dtype, block_size, 3, 20)
            k, v = layout.allocate(32)
            assert k.nbytes + v.nbytes == 32 * layout.block_bytes


def test_the_buffers_of_a_model_reach_the_end_of_a_huge_page_at_different_tokens() -> None:
    layout = CacheLayout(torch.bfloat16, block_size=16, num_kv_heads=3, head_dim=64)
    num_layers = 30
    buffers = [
        buffer for index in range(num_layers) for buffer in layout.allocate(4096, index=index, num_layers=num_layers)
    ]
    rests = sorted(-buffer.data_ptr() % HUGE_PAGE_BYTES for buffer in buffers)
    distances = [later - earlier for earlier, later in pairwise([*rests, rests[0] + HUGE_PAGE_BYTES])]
    assert min(distances) >= HUGE_PAGE_BYTES // (2 * num_layers) - SMALL_PAGE_BYTES
