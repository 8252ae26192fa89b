"""`paged_attention` on a GPU: right, and the same bits for a position in any step and any division of the work."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_attention import attend, check, family, step_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from paged_requests import Paged, in_integers, paged
from pairwise import LONG_IF_INTERPRETED, pairwise
from torch import Tensor
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.paged_attention import AttentionShape, cases, gpu, gpu_plan
from octavo.kernels.paged_attention.gpu_decode_plan import plan_decodes
from octavo.kernels.paged_attention.gpu_plan import Limits

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

BLOCK_SIZES = [*cases.BLOCK_SIZES, 64, 256]
ALL = pairwise(list(cases.TOLERANCES), cases.BATCHES, cases.HEADS, cases.WINDOWS, BLOCK_SIZES)
FEW = [
    (dtype, *case, 5)
    for dtype in (torch.float32, BF16)
    for case in (
        (cases.BATCHES[0], (4, 4, 16), None),
        (cases.BATCHES[1], (9, 3, 64), 150),
        (cases.BATCHES[2], (9, 3, 64), None),
        (cases.BATCHES[2], (20, 1, 32), 1),
    )
]
"""The interpreter is slow."""

SHAPES = {
    "soft cap": AttentionShape(4, 2, 32, 0.3, soft_cap=5.0),
    "slopes": AttentionShape(6, 2, 32, 0.2, slopes=tuple(2.0**-head for head in range(1, 7))),
    "all at once": AttentionShape(4, 2, 32, 0.2, window=100, soft_cap=8.0, slopes=(0.5, 0.25, 0.125, 0.06)),
    "heads of 80": AttentionShape(4, 1, 80, 0.11),
    "heads of 96": AttentionShape(4, 4, 96, 0.1, window=150),
    "heads of 112": AttentionShape(3, 3, 112, 0.09),
    "heads of 256": AttentionShape(8, 4, 256, 1 / 16, window=200, soft_cap=50.0),
    "71 heads of one": AttentionShape(71, 1, 64, 0.125),
}
SEEN = {
    "everything": AttentionShape(4, 2, 32, 0.2),
    "a window": AttentionShape(4, 2, 32, 0.2, window=90),
    "chunks": AttentionShape(4, 2, 32, 0.2, window=90, is_chunked=True),
}
"""What a token sees beside a sink."""
SHARED = [(BF16, "slopes"), (torch.float32, "heads of 112"), (torch.float16, "soft cap"), (BF16, "heads of 80")]


@pytest.mark.parametrize(("dtype", "batch", "heads", "window", "block_size"), FEW if IS_INTERPRETING else ALL, ids=str)
def test_paged_attention(
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
    batch: list[tuple[int, int]],
    heads: tuple[int, int, int],
    window: int | None,
    block_size: int,
) -> None:
    shape = AttentionShape(*heads, scale=heads[2] ** -0.5, window=window)
    data = paged([keys for _, keys in batch], block_size, shape, dtype, seed)
    parts = [(request, rows, keys) for request, (rows, keys) in enumerate(batch)]
    check(device, data, parts, block_size, shape, cases.TOLERANCES[dtype])


def test_few_forms_of_the_kernels_are_compiled() -> None:
    """Each takes a second or two, and there are two kernels."""
    forms = {(dtype, heads, min(window or 0, 2), block_size) for dtype, _, heads, window, block_size in ALL}
    assert len(forms) <= 20


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_models(device: torch.device, seed: int, name: str) -> None:
    shape = SHAPES[name]
    data = paged([300, 70], 16, shape, BF16, seed)
    check(device, data, [(0, 1, 300), (1, 65, 70)], 16, shape, cases.TOLERANCES[BF16])


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_cache_of_8_bits(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU has no float8_e4m3fn")
    shape = AttentionShape(4, 2, 64, scale=0.125)
    data = paged([270, 70], 16, shape, dtype, seed)
    data = replace(data, k_cache=(data.k_cache * 4).to(FP8), v_cache=(data.v_cache * 8).to(FP8))
    parts = [(0, 1, 270), (1, 40, 70)]
    check(device, data, parts, 16, shape, cases.TOLERANCES[dtype], k_scale=0.25, v_scale=0.125)


INTEGERS = {
    "float32": (torch.float32, AttentionShape(4, 2, 32, 0.2)),
    "float16": (torch.float16, AttentionShape(9, 3, 64, 0.125, window=100)),
    "soft cap and slopes": (BF16, AttentionShape(4, 2, 64, 0.125, soft_cap=5.0, slopes=(0.5, 0.25, 0.1, 0.06))),
    "heads of 80": (BF16, AttentionShape(4, 1, 80, 0.11)),
}


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        *[(name, 16 if number % 2 else 5) for number, name in enumerate(INTEGERS)],
        *[pytest.param(name, 5 if n % 2 else 16, marks=LONG_IF_INTERPRETED) for n, name in enumerate(INTEGERS)],
    ],
)
def test_a_cache_of_integers(device: torch.device, seed: int, name: str, block_size: int) -> None:
    """Right, and the same bits for a position as a decode, in a chunk, and beside other requests."""
    dtype, shape = INTEGERS[name]
    data = paged([300, 70], block_size, shape, dtype, seed)
    data.v_cache *= 0.003  # weights are multiplied by scales of values, which must not lose bits of float16
    data = in_integers(data)
    sinks = random(shape.num_heads, seed=5, scale=4.0) if name == "float16" else None
    parts = [(0, 1, 300), (1, 40, 70), (0, 30, 290)]
    check(device, data, parts, block_size, shape, cases.TOLERANCES[dtype], sinks)
    whole = attend(device, data, [(0, 130, 300)], block_size, shape, sinks)[0]
    decode, _, chunk = attend(device, data, parts, block_size, shape, sinks)
    assert torch.equal(decode, whole[-1:]) and torch.equal(chunk, whole[90:120])


# On a GPU a new block size or shape of heads is another compilation, and so is a window instead of none.
@settings(max_examples=6 if IS_INTERPRETING else 60)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 280)), min_size=1, max_size=4),
    block_size=st.integers(1, 70) if IS_INTERPRETING else st.sampled_from([1, 16, 70]),
    heads=st.sampled_from(cases.HEADS if IS_INTERPRETING else cases.HEADS[::3]),
    window=st.none() | (st.integers(1, 300) if IS_INTERPRETING else st.sampled_from([2, 63, 64, 65, 299])),
)
def test_any_batch(
    device: torch.device,
    lens: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int, int],
    window: int | None,
) -> None:
    shape = AttentionShape(*heads, scale=heads[2] ** -0.5, window=window)
    data = paged([rows + before for rows, before in lens], block_size, shape, BF16)
    parts = [(request, rows, rows + before) for request, (rows, before) in enumerate(lens)]
    check(device, data, parts, block_size, shape, cases.TOLERANCES[BF16])


SAME_BITS = [(BF16, None), (BF16, 150), (torch.float16, 150), (torch.float32, None)]


@pytest.mark.parametrize(("dtype", "window"), SAME_BITS[:2] if IS_INTERPRETING else SAME_BITS, ids=str)
def test_a_position_has_the_same_bits_in_every_step(
    device: torch.device, seed: int, dtype: torch.dtype, window: int | None
) -> None:
    """As a row of a prompt, of any chunk of it, and as a decode, alone or beside others."""
    shape = AttentionShape(3, 1, 64, scale=0.125, window=window)
    length = 530 if IS_INTERPRETING else 5000
    data = paged([length, 290, 131], 16, shape, dtype, seed)
    whole = attend(device, data, [(0, length, length)], 16, shape)[0]
    chunks = [(1, length), (1, 256), (1, 257), (7, 260), (21, 512), (22, 300), (100, 140), (17, 17)]
    if not IS_INTERPRETING:
        chunks += [(1, keys) for keys in range(1, length, 7)] + [(900, 4000), (64, 2100), (4000, 5000)]
    parts = [(0, rows, keys) for rows, keys in chunks]
    beside = attend(device, data, [(1, 1, 290), *parts, (2, 131, 131)], 16, shape)[1:-1]
    for (_, rows, keys), actual in zip(parts, beside, strict=True):
        assert torch.equal(actual, whole[keys - rows : keys]), (rows, keys)
    for part in parts[:2]:
        assert torch.equal(attend(device, data, [part], 16, shape)[0], whole[part[2] - part[1] : part[2]]), part


@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        (BF16, None),
        (torch.float32, 90),
        pytest.param(BF16, 1, marks=LONG_IF_INTERPRETED),
        pytest.param(torch.float16, 301, marks=LONG_IF_INTERPRETED),
    ],
)
def test_attention_in_both_directions(device: torch.device, seed: int, dtype: torch.dtype, window: int | None) -> None:
    shape = AttentionShape(4, 2, 32, 0.2, window=window, is_causal=False)
    lengths = [300, 1, 129, 20, 64]
    data = paged(lengths, 16, shape, dtype, seed)
    parts = [(request, length, length) for request, length in enumerate(lengths)]
    check(device, data, parts, 16, shape, cases.TOLERANCES[dtype])
    beside = attend(device, data, parts, 16, shape)
    for part, rows in zip(parts[1:], beside[1:], strict=True):
        assert torch.equal(attend(device, data, [part], 16, shape)[0], rows), part


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_do_not_depend_on_how_many_a_rank_has(device: torch.device, seed: int, num_kv_heads: int) -> None:
    """Two of four query heads, with the keys of one of two heads, or half of those of the only one."""
    whole = AttentionShape(4, num_kv_heads, 64, scale=0.125)
    data = paged([300, 40], 16, whole, BF16, seed)
    parts = [(0, 1, 300), (1, 40, 40)]
    expected = attend(device, data, parts, 16, whole)
    head = num_kv_heads - 1
    keys, values = (cache[:, :, head : head + 1].contiguous() for cache in (data.k_cache, data.v_cache))
    own = Paged(keys, values, data.block_table, [rows[:, 2:] for rows in data.queries])
    found = attend(device, own, parts, 16, AttentionShape(2, 1, 64, scale=0.125))
    assert all(torch.equal(one, other[:, 2:]) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["everything", "chunks"] if IS_INTERPRETING else SEEN)
def test_sinks_and_chunks(device: torch.device, seed: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all kernels, with a request in one program and in several, and the same bits in all of them."""
    shape = SEEN[name]
    data = paged([300], 16, shape, BF16, seed)
    sinks = random(4, seed=seed, scale=3.0) + torch.tensor([0.0, 2.0, -200.0, 60.0])
    parts = [(0, 1, 300), (0, 70, 300), (0, 9, 260)]
    check(device, data, parts, 16, shape, cases.TOLERANCES[BF16], sinks=sinks)
    decode, chunk, _ = attend(device, data, parts, 16, shape, sinks)
    assert torch.equal(decode[0], chunk[-1])
    monkeypatch.setattr(gpu, "_num_processors", lambda _: 1)
    assert torch.equal(attend(device, data, [(0, 1, 300), (0, 9, 260)], 16, shape, sinks)[0], decode)


def test_blocks_that_a_window_has_passed_are_not_read(device: torch.device, seed: int) -> None:
    shape = AttentionShape(3, 1, 64, scale=0.125, window=90)
    data = paged([530], 16, shape, BF16, seed)
    for rows, keys in ((1, 530), (1, 300), (150, 400)):
        lost = data.without(0, keys - rows - 90 + 1, 16)
        expected = attend(device, data, [(0, rows, keys)], 16, shape)[0]
        assert torch.equal(attend(device, lost, [(0, rows, keys)], 16, shape)[0], expected)


@pytest.mark.skipif(not IS_INTERPRETING, reason="needs no GPU")
def test_segments_are_added_in_one_order_on_hopper_and_blackwell(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper adds a segment within the next one's first tile."""
    shape = AttentionShape(3, 1, 16, scale=0.25, window=300)
    data = paged([600], 16, shape, BF16, 0)
    parts = [(0, 60, 200), (0, 60, 256), (0, 60, 600)]
    expected = attend(device, data, parts, 16, shape)
    monkeypatch.setattr(gpu, "architecture", lambda: 100)
    for actual, rows in zip(attend(device, data, parts, 16, shape), expected, strict=True):
        assert torch.equal(actual, rows)


def test_any_number_of_programs_gives_the_same_bits(
    device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = AttentionShape(4, 2, 16, scale=0.25)
    data = paged([700, 290, 40], 16, shape, BF16, seed)
    parts = [(0, 3, 700), (1, 1, 290), (2, 1, 40)]
    expected = attend(device, data, parts, 16, shape)
    for num_programs in (1, 3, 1000):
        monkeypatch.setattr(gpu, "_num_processors", lambda _, number=num_programs: number)
        for actual, rows in zip(attend(device, data, parts, 16, shape), expected, strict=True):
            assert torch.equal(actual, rows), num_programs


@pytest.mark.parametrize(("dtype", "name"), SHARED[:1] if IS_INTERPRETING else SHARED, ids=str)
def test_requests_that_share_keys_have_the_bits_of_each_alone(
    device: torch.device, seed: int, dtype: torch.dtype, name: str
) -> None:
    shape = SHAPES[name]
    own = [40, 270, 1, 16, 600, 17, 33, 250, 90, 7, 20]
    num_members = 3 if IS_INTERPRETING else 11
    data = family(num_members, 512, own, shape, dtype, seed)
    parts = [(member, 1, 512 + own[member]) for member in range(num_members)]
    step, _, _ = step_of(device, data, parts, 16, shape)
    assert int(step.words_W[step.layout.num_items]) > 0
    together = attend(device, data, parts, 16, shape)
    for part, actual in zip(parts, together, strict=True):
        assert torch.equal(attend(device, data, [part], 16, shape)[0], actual), part
    check(device, data, parts, 16, shape, cases.TOLERANCES[dtype])


def test_a_request_beyond_the_limits_is_not_divided_and_has_the_same_bits(device: torch.device, seed: int) -> None:
    """In float32, where another order of segments shows."""
    shape = AttentionShape(4, 2, 16, scale=0.25)
    data = paged([1000, 290], 16, shape, torch.float32, seed)
    expected = torch.cat(attend(device, data, [(0, 1, 1000), (1, 1, 290)], 16, shape))
    queries = torch.stack([data.queries[0][-1], data.queries[1][-1]]).to(device)
    for limits in (Limits(2, 2, 2), Limits(2, 2, 0)):
        step = gpu.StepAttention(shape, 16, limits, data.block_table.to(device))
        words = np.empty(step.layout.num_words, dtype=np.int32)
        assert step.write_plan(words, [0, 1, 2], [1000, 290]).num_tiles == 0
        step.words_W.copy_(torch.from_numpy(words))
        actual = step(queries, data.k_cache.to(device), data.v_cache.to(device))
        assert torch.equal(actual.cpu(), expected), limits


def test_caches_whose_heads_lie_apart(device: torch.device, seed: int) -> None:
    shape = AttentionShape(4, 2, 32, scale=0.2)
    data = paged([40, 30], 16, shape, BF16, seed)
    expected = attend(device, data, [(0, 1, 40), (1, 30, 30)], 16, shape)
    apart = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (data.k_cache, data.v_cache)]
    actual = attend(device, replace(data, k_cache=apart[0], v_cache=apart[1]), [(0, 1, 40), (1, 30, 30)], 16, shape)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_one_memory_serves_steps_of_all_sizes(device: torch.device, seed: int) -> None:
    """What a graph relies on: a launch that was recorded does the work of the plan that is there when it runs."""
    shape = AttentionShape(4, 2, 16, scale=0.25)
    data = paged([520, 290, 40, 1], 16, shape, BF16, seed)
    caches = data.k_cache.to(device), data.v_cache.to(device)
    table = torch.zeros_like(data.block_table).to(device)
    step = gpu.StepAttention(shape, 16, Limits(4, 4, 100), table)
    queries = torch.zeros(4, 4, 16, dtype=BF16, device=device)
    words = np.empty(step.layout.num_words, dtype=np.int32)
    step.write_plan(words, range(5), [1] * 4)
    step.words_W.copy_(torch.from_numpy(words))
    run = recorded(lambda: step(queries, *caches), device)
    for requests in ([0, 1, 2, 3], [2], [1, 0]):
        table[: len(requests)] = data.block_table[requests].to(device)
        queries[: len(requests)] = torch.stack([data.queries[request][-1] for request in requests]).to(device)
        lens = [len(data.queries[request]) for request in requests]
        counts = step.write_plan(words, range(5), lens + [0] * (4 - len(lens)))
        assert counts.num_tiles == 0
        step.words_W.copy_(torch.from_numpy(words))
        out = run().cpu()
        for row, request in enumerate(requests):
            (expected,) = attend(device, data, [(request, 1, lens[row])], 16, shape)
            assert torch.equal(out[row], expected[0])


def recorded(call, device: torch.device):
    """Return a function that does what `call` does: from a graph where there are graphs."""
    if device.type != "cuda":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def test_it_refuses_what_it_has_no_tiles_for(device: torch.device) -> None:
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for shape in (AttentionShape(4, 2, 512, scale=1.0), AttentionShape(200, 1, 64, scale=1.0)):
        with pytest.raises(ShapeError, match="no tiles for"):
            gpu.plan([0, 1], [1], table, 16, shape)
    step = gpu.plan([0, 1], [1], table, 16, AttentionShape(4, 2, 32, scale=1.0))
    q, cache = torch.zeros(1, 4, 32, dtype=BF16, device=device), torch.zeros(1, 16, 2, 32, device=device)
    with pytest.raises(ShapeError, match="for caches of"):
        step(q, cache, cache)
    with pytest.raises(ShapeError, match="and a cache"):
        step(q, cache[:, :8].bfloat16(), cache[:, :8].bfloat16())


@pytest.mark.parametrize(
    ("window", "is_chunked", "is_causal"),
    [(None, False, True), (300, False, True), (512, True, True), (700, False, False)],
)
@pytest.mark.parametrize("max_partials", [1000, 9])
def test_plans_of_decodes_made_on_the_device(
    device: torch.device, max_partials: int, window: int | None, is_chunked: bool, is_causal: bool
) -> None:
    shape = AttentionShape(6, 3, 16, 1.0, window=window, is_chunked=is_chunked, is_causal=is_causal)
    grid = gpu_plan.Grid(8, 4, 4, group=2, num_kv_heads=3, num_programs=7)
    layout = gpu_plan.Layout.of(gpu_plan.Limits(9, 100, max_partials), grid)
    lens = [1, 256, 257, 4000, 700, 3, 513]
    words = np.zeros(layout.num_words, dtype=np.int32)
    counts = gpu_plan.write(words, layout, grid, shape, np.arange(len(lens) + 1), np.array(lens))
    found_W = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
    plan_decodes(found_W, layout, grid, shape, torch.tensor([*lens, 0, 0], device=device))
    found = found_W.cpu().numpy()
    assert counts.num_tiles == 0
    assert np.array_equal(found[: counts.num_split_words], words[: counts.num_split_words])
