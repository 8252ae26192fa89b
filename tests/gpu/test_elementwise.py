"""Activations, rotations, look-ups, quantized rows and the writing of the cache, on a GPU."""

import itertools

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random

from octavo.kernels.add import add
from octavo.kernels.embedding import cases as embedding_cases
from octavo.kernels.embedding import gpu as embedding_gpu
from octavo.kernels.embedding import reference as embedding_reference
from octavo.kernels.gelu import cases as gelu_cases
from octavo.kernels.gelu import gpu as gelu_gpu
from octavo.kernels.gelu import reference as gelu_reference
from octavo.kernels.gelu_and_mul import cases as geglu_cases
from octavo.kernels.gelu_and_mul import gpu as geglu_gpu
from octavo.kernels.gelu_and_mul import reference as geglu_reference
from octavo.kernels.given_rows import GIVEN
from octavo.kernels.given_rows import cases as given_rows_cases
from octavo.kernels.given_rows import gpu as given_rows_gpu
from octavo.kernels.given_rows import reference as given_rows_reference
from octavo.kernels.pointwise import cases as pointwise_cases
from octavo.kernels.pointwise import gpu as pointwise_gpu
from octavo.kernels.pointwise import reference as pointwise_reference
from octavo.kernels.pointwise.functions import Function
from octavo.kernels.relu import relu
from octavo.kernels.rope import cases as rope_cases
from octavo.kernels.rope import gpu as rope_gpu
from octavo.kernels.rope import reference as rope_reference
from octavo.kernels.sigmoid_and_mul import cases as sigmoid_cases
from octavo.kernels.sigmoid_and_mul import gpu as sigmoid_gpu
from octavo.kernels.sigmoid_and_mul import reference as sigmoid_reference
from octavo.kernels.silu_and_mul import cases as silu_cases
from octavo.kernels.silu_and_mul import gpu as silu_gpu
from octavo.kernels.silu_and_mul import reference as silu_reference
from octavo.kernels.slot_rows import DRAFTED
from octavo.kernels.slot_rows import gpu as slot_gpu
from octavo.kernels.slot_rows import reference as slot_reference
from octavo.kernels.store_kv import cases as store_cases
from octavo.kernels.store_kv import gpu as store_gpu
from octavo.kernels.store_kv import reference as store_reference


@pytest.mark.parametrize("dtype", silu_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", silu_cases.WIDTHS)
def test_silu_and_mul(device: torch.device, seed: int, width: int, dtype: torch.dtype) -> None:
    for rows in silu_cases.ROWS[:3]:
        x = random(rows, 2 * width, dtype=dtype, seed=seed + rows, scale=4.0)
        actual = silu_gpu.silu_and_mul(x.to(device)).cpu()
        assert_close(actual, silu_reference.silu_and_mul(x), silu_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", sigmoid_cases.TOLERANCES, ids=str)
def test_sigmoid_and_mul(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    for shape in sigmoid_cases.SHAPES:
        gate, x = (random(3, width, dtype=dtype, seed=seed + width, scale=4.0) for width in shape)
        for rows in (slice(0, 3), slice(2, 3)):
            actual = sigmoid_gpu.sigmoid_and_mul(gate[rows].to(device), x[rows].to(device)).cpu()
            assert_close(actual, sigmoid_reference.sigmoid_and_mul(gate, x)[rows], sigmoid_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("uses_tanh", [False, True])
@pytest.mark.parametrize("dtype", gelu_cases.TOLERANCES, ids=str)
def test_gelu(device: torch.device, seed: int, dtype: torch.dtype, uses_tanh: bool) -> None:
    for rows, width in itertools.product(gelu_cases.ROWS[:3], gelu_cases.WIDTHS[1:]):
        x = random(rows, width, dtype=dtype, seed=seed + rows, scale=4.0)
        x[0, :2] = torch.tensor([60.0, -60.0])
        actual = gelu_gpu.gelu(x.to(device), uses_tanh).cpu()
        assert_close(actual, gelu_reference.gelu(x, uses_tanh), gelu_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("uses_tanh", [False, True])
def test_gelu_and_mul(device: torch.device, seed: int, uses_tanh: bool) -> None:
    dtype = torch.bfloat16
    for rows, width in itertools.product(geglu_cases.ROWS[:3], geglu_cases.WIDTHS[1:]):
        x = random(rows, 2 * width, dtype=dtype, seed=seed + rows, scale=3.0)
        actual = geglu_gpu.gelu_and_mul(x.to(device), uses_tanh).cpu()
        assert_close(actual, geglu_reference.gelu_and_mul(x, uses_tanh), geglu_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("function", Function)
def test_pointwise(device: torch.device, seed: int, function: Function) -> None:
    parameter, dtype, width = pointwise_cases.PARAMETERS[function], torch.bfloat16, pointwise_cases.WIDTHS[1]
    for rows in pointwise_cases.ROWS[:3]:
        x = random(rows, width, dtype=dtype, seed=seed + rows, scale=3.0)
        actual = pointwise_gpu.pointwise(function, x.to(device), parameter).cpu()
        expected = pointwise_reference.pointwise(function, x, parameter)
        assert_close(actual, expected, pointwise_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", rope_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim", "num_pairs"), rope_cases.HEADS)
def test_rope(
    device: torch.device, seed: int, num_heads: int, head_dim: int, num_pairs: int, dtype: torch.dtype
) -> None:
    for rows in rope_cases.ROWS[:3]:
        wide = random(rows, num_heads + 3, head_dim, dtype=dtype, seed=seed + rows)
        angles = random(rows, num_pairs, seed=seed) * 100
        cos, sin = angles.cos(), angles.sin()
        actual = rope_gpu.rope(wide.to(device)[:, 1:-2], cos.to(device), sin.to(device)).cpu()
        assert_close(actual, rope_reference.rope(wide[:, 1:-2], cos, sin), rope_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", embedding_cases.DTYPES, ids=str)
def test_what_torch_does_on_a_gpu(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    a, b = random(2, 7, 33, dtype=dtype, seed=seed)
    assert torch.equal(add(a.to(device), b.to(device)).cpu(), (a.double() + b.double()).to(dtype))
    assert torch.equal(relu(a.to(device)).cpu(), a.clamp(min=0))
    ids = torch.tensor([6, 0, 3, 3])
    rows = embedding_gpu.embedding(ids.to(device), a.to(device)).cpu()
    assert torch.equal(rows, embedding_reference.embedding(ids, a))


@pytest.mark.parametrize("dtype", given_rows_cases.DTYPES, ids=str)
def test_given_rows(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    x, given = random(5, 1030, dtype=dtype, seed=seed), random(7, 1030, dtype=dtype, seed=seed + 1)
    ids = torch.tensor([4, GIVEN, -2, GIVEN, 0])
    x[ids < 0] = torch.nan
    actual = given_rows_gpu.take_given_rows(x.to(device), ids.to(device), given.to(device), GIVEN).cpu()
    expected = given_rows_reference.take_given_rows(x, ids, given, GIVEN)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert not len(given_rows_gpu.take_given_rows(x[:0].to(device), ids[:0].to(device), given.to(device), GIVEN))


@pytest.mark.parametrize(("num_rows", "width"), [(1, 33), (5, 1500)])
def test_rows_of_several_tables(device: torch.device, seed: int, num_rows: int, width: int) -> None:
    tables = [random(9, width, dtype=torch.bfloat16, seed=seed), random(7, 8, seed=seed), random(8, 7, seed=seed).T]
    ids = [torch.randint(0, len(table), (num_rows,)) for table in tables]
    lookups = [(some.to(device), table.to(device)) for some, table in zip(ids, tables, strict=True)]
    for rows, some, table in zip(embedding_gpu.embeddings(*lookups), ids, tables, strict=True):
        assert torch.equal(rows.cpu(), embedding_reference.embedding(some, table))
    padding = torch.tensor([-2], device=device)
    assert all(rows.isnan().all() for rows in embedding_gpu.embeddings(*((padding, table) for _, table in lookups)))
    assert [len(rows) for rows in embedding_gpu.embeddings(*((some[:0], table) for some, table in lookups))] == [0] * 3


@pytest.mark.parametrize(("num_tokens", "num_requests", "widths"), [(3, 2, (5,)), (1030, 1, (40, 1025))])
def test_tokens_and_blocks_of_slots(
    device: torch.device, num_tokens: int, num_requests: int, widths: tuple[int, ...]
) -> None:
    token_ids, last = torch.arange(num_tokens) % 7 - 1, torch.arange(100, 104)
    token_ids[1::3], drafts = DRAFTED - torch.arange(len(token_ids[1::3])) % 2, torch.arange(200, 208).view(2, 4)
    token_slots, slots = torch.arange(num_tokens) % 4, torch.tensor([3, 1])[:num_requests]
    block_ids = [torch.arange(4 * width, dtype=torch.int32).view(4, width) for width in widths]
    tables = [torch.full((3, width), -5, dtype=torch.int32) for width in widths]
    on_device = [table.to(device) for table in tables]
    inputs = [token_ids, token_slots, last, drafts, slots]
    expected = slot_reference.read_slots(*inputs, block_ids, [table[:num_requests] for table in tables])
    actual = slot_gpu.read_slots(
        *(values.to(device) for values in inputs),
        [ids.to(device) for ids in block_ids],
        [table[:num_requests] for table in on_device],
    )
    assert torch.equal(actual.cpu(), expected)
    assert expected[:2].tolist() == [100, 201], "the first token is pending, the second is drafted"
    for one, table in zip(on_device, tables, strict=True):
        assert torch.equal(one.cpu(), table), "rows of other requests stay"


def test_rows_are_taken_back_to_the_first_wrong_draft(device: torch.device) -> None:
    drafts = torch.tensor([[0, 5, 6, 7], [0, 8, 9, 3]])
    sampled = torch.tensor([[0, 5, 6, 1], [0, 8, 2, 4], [0, 4, 9, 9]])
    given = torch.tensor([[DRAFTED, DRAFTED, 7, 5], [DRAFTED - 1, DRAFTED - 1, 4, 8]])
    slots, counts = torch.tensor([1, 2, 3, 1]), torch.tensor([2, 2, 2, 0])
    numbers = [torch.arange(10, 16), torch.arange(20, 24)]
    inputs = [sampled, drafts, given, slots, counts]
    on_device = [each.clone().to(device) for each in numbers]
    slot_gpu.rewind_rows(*(each.to(device) for each in inputs), on_device)
    slot_reference.rewind_rows(*inputs, numbers)
    assert numbers[0].tolist() == [10, 10, 10, 13, 14, 15], "none is wrong, the second, the first; there is none"
    assert [each.tolist() for each in on_device] == [each.tolist() for each in numbers]


def test_rows_advance_to_the_end_of_their_blocks(device: torch.device) -> None:
    positions, mapping, slots = torch.tensor([2, 7, 3, 0]), torch.tensor([9, 8, 10, -1]), torch.tensor([1, 2, 0, 3])
    limits, draws = torch.tensor([8, 5, 8, 0]), [torch.arange(4), torch.arange(4, 8)]
    block_ids = torch.tensor([[5, 2], [4, 3], [0, 1], [0, 0]], dtype=torch.int32)
    rows = [positions, mapping, slots, limits, block_ids]
    on_device, draws_on_device = ([each.clone().to(device) for each in some] for some in (rows, draws))
    for expected_lens in ([4, 8, 5, 0], [5, 8, 6, 0], [5, 8, 7, 0]):
        lens = slot_reference.advance_rows(*rows, 4, draws)
        assert lens.tolist() == expected_lens
        assert torch.equal(slot_gpu.advance_rows(*on_device, 4, draws_on_device).cpu(), lens)
        for one, other in zip([*rows, *draws], [*on_device, *draws_on_device], strict=True):
            assert torch.equal(other.cpu(), one)
    assert mapping.tolist() == [-1, -1, 2 * 4 + 2, -1]


@pytest.mark.parametrize("heads_are_outside", [False, True])
@pytest.mark.parametrize("dtype", store_cases.DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), store_cases.HEADS)
def test_store_kv(
    device: torch.device, seed: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, heads_are_outside: bool
) -> None:
    for rows, block_size in itertools.product(store_cases.ROWS[:2], store_cases.BLOCK_SIZES):
        k, v = random(rows, 2 * num_kv_heads, head_dim, dtype=dtype, seed=seed).split(num_kv_heads, dim=1)
        shape = (2, 80 // block_size, block_size, num_kv_heads, head_dim)
        expected = random(*shape, dtype=dtype, seed=seed + 1)
        cache = expected.to(device)
        if heads_are_outside:
            cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
        slots = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:rows]
        store_gpu.store_kv(k.to(device), v.to(device), cache[0], cache[1], slots.to(device))
        store_reference.store_kv(k, v, expected[0], expected[1], slots)
        assert torch.equal(cache.cpu(), expected)


def test_store_kv_in_8_bits(device: torch.device, seed: int) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8_e4m3fn")
    k, v = random(2, 5, 3, 64, dtype=torch.bfloat16, seed=seed, scale=3.0)
    k[0, 0, :3], v[1, 2, 5] = torch.tensor([1e4, -1e4, torch.nan]), torch.inf
    caches = torch.zeros(2, 4, 16, 3, 64, dtype=torch.float8_e4m3fn)
    expected = caches.clone()
    moved = caches.to(device)
    slots = torch.tensor([5, 63, 0, 17, 16])
    store_gpu.store_kv(k.to(device), v.to(device), moved[0], moved[1], slots.to(device), 0.07, 0.5)
    store_reference.store_kv(k, v, expected[0], expected[1], slots, 0.07, 0.5)
    torch.testing.assert_close(moved.cpu().float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    assert bool(moved.cpu().float()[0, 0, 5, 0, 2].isnan())
    assert moved.cpu().float()[0, 0, 5, 0, :2].tolist() == [448.0, -448.0]


def test_store_kv_leaves_out_negative_slots(device: torch.device) -> None:
    k = torch.ones(2, 1, 8, device=device)
    cache = torch.zeros(2, 2, 4, 1, 8, device=device)
    store_gpu.store_kv(k, k, cache[0], cache[1], torch.tensor([-1, 5], device=device))
    assert cache.sum() == 16
    assert cache[:, 1, 1].sum() == 16


def test_rows_do_not_depend_on_the_batch(device: torch.device, seed: int) -> None:
    rows = random(20, 66, dtype=torch.bfloat16, seed=seed).to(device)
    assert_rows_independent(silu_gpu.silu_and_mul, rows)
    assert_rows_independent(lambda x: gelu_gpu.gelu(x, True), rows)
    assert_rows_independent(lambda x: gelu_gpu.gelu(x, False), rows)
