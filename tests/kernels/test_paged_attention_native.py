"""`paged_attention` in C++: close to the reference at every instruction set level, and the same bits in any step."""

from dataclasses import dataclass, replace

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, random
from native_cache import NativeCache, read
from native_checks import LEVELS
from paged_requests import scored
from pairwise import pairwise, pairwise_of_levels
from torch import Tensor

from octavo.kernels.native import library
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.paged_attention import AttentionShape, cases, reference
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.kernels.paged_attention.native import ShapeArguments

TOLERANCES = cases.TOLERANCES | {
    torch.float16: 2e-6,
    torch.int8: 3e-2,
    torch.float8_e4m3fn: cases.TOLERANCES[torch.bfloat16],
}
"""Tolerances by cache type, against the reference with the stored keys and values. float16 is widened to float32.
For int8 the queries are rounded to 8 bits too; random steps differed by at most 2.3e-2 of the largest value."""


@dataclass
class Requests:
    """Requests with keys and values in a cache, and a query for each of their positions."""

    cache: NativeCache
    shape: AttentionShape
    block_table: Tensor
    queries: list[Tensor]
    sinks: Tensor | None = None
    are_spans: list[bool] | None = None

    @classmethod
    def make(
        cls, native: NativeLibrary, context_lens: list[int], block_size: int, shape: AttentionShape, dtype: torch.dtype
    ) -> "Requests":
        """Scatter the blocks of the requests over a cache whose other slots hold NaN."""
        num_blocks = [-(-length // block_size) for length in context_lens]
        order = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(7)).int()
        layout = CacheLayout.of(shape, dtype, block_size)
        has_scales = dtype == torch.float8_e4m3fn
        scales = (0.3, 0.3 if shape.key_value_dim else 0.01) if has_scales else (1.0, 1.0)
        cache = NativeCache(native, layout, len(order), scales=scales)
        table = torch.zeros(len(context_lens), max(num_blocks) + 2, dtype=torch.int32)
        queries = []
        for request, (length, blocks) in enumerate(
            zip(context_lens, order[: sum(num_blocks)].split(num_blocks), strict=True)
        ):
            table[request, : len(blocks)] = blocks
            k, v = random(2, length, shape.num_kv_heads * shape.head_dim, seed=100 + request)
            slots = (blocks.long().unsqueeze(1) * block_size + torch.arange(block_size)).flatten()[:length]
            cache.store(k, v if shape.key_value_dim is None else None, slots)
            queries.append(random(length, shape.num_heads * shape.head_dim, seed=200 + request, scale=2.0))
        return cls(cache, shape, table, queries)

    def attend(self, parts: list[tuple[int, int, int]], num_threads: int = 1, **options: torch.dtype) -> list[Tensor]:
        """Attend for (request, rows, keys) triples in one step; return the rows of each triple."""
        rows = [num_rows for _, num_rows, _ in parts]
        starts = [sum(rows[:index]) for index in range(len(rows) + 1)]
        queries = torch.cat([self.queries[request][keys - num : keys] for request, num, keys in parts])
        tables = self.block_table[[request for request, _, _ in parts]]
        self.cache.num_threads = num_threads
        lens = [keys for _, _, keys in parts]
        out = self.cache.attend(
            queries, starts, lens, tables, self.shape, **options, sinks=self.sinks, is_span_R=self.are_spans
        )
        return list(out.split(rows))

    def expected(self, parts: list[tuple[int, int, int]]) -> Tensor:
        """Return the reference's rows for the stored keys and values."""
        layout, num_slots = self.cache.layout, self.cache.num_blocks * self.cache.layout.block_size
        paged = (self.cache.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        keys = read(self.cache.k, layout, keys=True)[:num_slots].view(paged)
        values = keys[..., : self.shape.value_dim]
        if layout.key_value_dim is None:
            values = read(self.cache.v, layout, keys=False)[:num_slots].view(paged)
        rows = [num_rows for _, num_rows, _ in parts]
        starts = [sum(rows[:index]) for index in range(len(rows) + 1)]
        queries = torch.cat([self.queries[request][keys - num : keys] for request, num, keys in parts])
        tables = self.block_table[[request for request, _, _ in parts]]
        lens = [keys for _, _, keys in parts]
        q_TNH = queries.unflatten(1, (self.shape.num_heads, -1))
        shape = self.shape
        k_scale, v_scale = self.cache.scales
        out = reference.paged_attention(
            q_TNH,
            keys,
            values,
            starts,
            lens,
            tables,
            shape,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks_N=self.sinks,
            is_span_R=self.are_spans,
        )
        return out.flatten(1)


def shape_of(heads: tuple[int, ...], window: int | None = None) -> AttentionShape:
    """Return the shape for query heads, key heads, head dimension and, if values are parts of keys, their length."""
    return AttentionShape(*heads[:3], heads[2] ** -0.5, window, key_value_dim=heads[3] if len(heads) > 3 else None)


PARTS_OF_KEYS = [(4, 1, 20, 12), (6, 2, 80, 64), (16, 1, 96, 32), (20, 1, 576, 512)]
HEADS = [*cases.HEADS, (6, 2, 8), (7, 1, 12), (4, 4, 20), (10, 2, 80), (4, 2, 256), *PARTS_OF_KEYS]


@pytest.mark.parametrize(
    ("heads", "batch", "window", "dtype", "block_size", "scoring"),
    pairwise(HEADS, cases.BATCHES, cases.WINDOWS, list(TOLERANCES), [*cases.BLOCK_SIZES, 48], cases.SCORINGS),
    ids=str,
)
def test_paged_attention(
    native_library: NativeLibrary,
    heads: tuple[int, ...],
    batch: list[tuple[int, int]],
    window: int | None,
    dtype: torch.dtype,
    block_size: int,
    scoring: str,
) -> None:
    shape, sinks = scored(shape_of(heads, window), scoring)
    requests = Requests.make(native_library, [keys for _, keys in batch], block_size, shape, dtype)
    requests.sinks = sinks
    parts = [(request, rows, keys) for request, (rows, keys) in enumerate(batch)]
    actual = torch.cat(requests.attend(parts, num_threads=2))
    assert_close(actual, requests.expected(parts), TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("native_library", "heads", "window", "dtype"),
    pairwise_of_levels(LEVELS, [*cases.HEADS, (7, 1, 12)], [None, 6, 150], list(TOLERANCES)),
    indirect=["native_library"],
    ids=str,
)
def test_rows_of_a_span_see_the_keys_after_them(
    native_library: NativeLibrary, heads: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    """A request consists of text, a span and text; an earlier step may have computed part of the span."""
    requests = Requests.make(native_library, [400, 90], 16, shape_of(heads, window), dtype)
    parts = [(0, 270, 270), (0, 80, 350), (0, 50, 400), (1, 90, 90)]
    requests.are_spans = [False, True, False, True]
    whole = requests.attend(parts, num_threads=3)
    assert_close(torch.cat(whole), requests.expected(parts), TOLERANCES[dtype])
    requests.are_spans = [True, False]
    rest, text = requests.attend([(0, 33, 350), (0, 50, 400)])
    assert torch.equal(rest, whole[1][-33:]) and torch.equal(text, whole[2])
    requests.are_spans = None
    (causal,) = requests.attend([(0, 400, 400)])
    assert torch.equal(causal[:270], whole[0]) and torch.equal(causal[350:], whole[2])
    assert not torch.equal(causal[270:349], whole[1][:-1])
    assert torch.equal(causal[349], whole[1][-1]), "its last row has no keys after it"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_no_number_is_seen_by_those_who_see_it(
    native_library: NativeLibrary, where: str, dtype: torch.dtype
) -> None:
    requests = Requests.make(native_library, [40, 40], 16, shape_of((2, 2, 20)), dtype)
    alone = requests.attend([(0, 40, 40), (1, 40, 40)])
    if where == "query":
        requests.queries[0][30, 19] = torch.nan
    else:
        k, v = random(2, 1, 40, seed=9)
        (k if where == "key" else v)[0, 19] = torch.nan
        slot = int(requests.block_table[0, 30 // 16]) * 16 + 30 % 16
        requests.cache.store(k, v, torch.tensor([slot]))
    spoilt, other = requests.attend([(0, 40, 40), (1, 40, 40)])
    assert torch.equal(other, alone[1])
    if where != "value":  # a weight of zero does not make zero of NaN: rows before may show it, of the same request
        assert torch.equal(spoilt[:30], alone[0][:30])
    first_head = spoilt[30:31] if where == "query" else spoilt[30:]
    assert bool(first_head[:, 19].isnan().all())


@pytest.mark.parametrize(
    ("dtype", "block_size", "is_chunked"), pairwise(list(TOLERANCES), [16, 24], [False, True]), ids=str
)
def test_blocks_that_a_window_has_passed_are_not_read(
    native_library: NativeLibrary, dtype: torch.dtype, block_size: int, is_chunked: bool
) -> None:
    shape = replace(shape_of((6, 2, 16), 70), is_chunked=is_chunked)
    requests = Requests.make(native_library, [600], block_size, shape, dtype)
    blocks = requests.block_table[0].clone()
    unused = min(set(range(requests.cache.num_blocks)) - set(blocks.tolist()))
    for rows, keys in ((250, 400), (40, 450), (1, 460), (1, 600)):
        requests.block_table[0] = blocks
        expected = requests.attend([(0, rows, keys)], num_threads=2)[0]
        assert_close(expected, requests.expected([(0, rows, keys)]), TOLERANCES[dtype])
        # All numbers of a block that was never written are NaN.
        requests.block_table[0, : shape.first_key(keys - rows) // block_size] = unused
        assert torch.equal(requests.attend([(0, rows, keys)], num_threads=2)[0], expected)


SCORINGS = st.sampled_from(["plain", "plain", "soft cap", "slopes", "all"])


@st.composite
def steps(draw: st.DrawFn) -> tuple[AttentionShape, int, torch.dtype, list[tuple[int, int]]]:
    """Draw a shape, a block size, a cache type, and (rows, keys) for each request."""
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 16))
    head_dim = draw(st.sampled_from([8, 12, 16, 20, 32, 36, 48, 64, 80, 96, 128, 256]))
    window = draw(st.none() | st.integers(1, 700))
    keys = draw(st.lists(st.integers(1, 600), min_size=1, max_size=5))
    batch = [(draw(st.just(1) | st.integers(1, min(length, 150))), length) for length in keys]
    block_size = draw(st.sampled_from([1, 4, 8, 16, 24, 32, 48]))
    heads: tuple[int, ...] = (num_kv_heads * group, num_kv_heads, head_dim)
    if draw(st.integers(0, 3)) == 0:
        heads = (*heads, draw(st.integers(1, head_dim)))
    shape, _ = scored(shape_of(heads, window), draw(SCORINGS))
    shape = replace(shape, is_chunked=window is not None and draw(st.booleans()))
    return shape, block_size, draw(dtypes()), batch


def dtypes() -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from(list(TOLERANCES))


@settings(max_examples=examples(25, 60), deadline=None)
@given(step=steps(), num_threads=st.integers(1, 3))
def test_any_step(
    native_library: NativeLibrary,
    step: tuple[AttentionShape, int, torch.dtype, list[tuple[int, int]]],
    num_threads: int,
) -> None:
    shape, block_size, dtype, batch = step
    requests = Requests.make(native_library, [keys for _, keys in batch], block_size, shape, dtype)
    parts = [(request, rows, keys) for request, (rows, keys) in enumerate(batch)]
    actual = requests.attend(parts, num_threads)
    assert_close(torch.cat(actual), requests.expected(parts), TOLERANCES[dtype])
    # The first request alone, its rows one by one, with another number of threads.
    _, rows, keys = parts[0]
    alone = [requests.attend([(0, 1, keys - rows + row + 1)], 4 - num_threads)[0] for row in range(0, rows, 13)]
    assert torch.equal(torch.cat(alone), actual[0][::13])


@pytest.mark.parametrize(
    ("native_library", "heads", "window", "dtype"),
    pairwise_of_levels(LEVELS, [(9, 3, 64), (8, 1, 128), (16, 1, 96, 80), (7, 1, 12)], [None, 150], list(TOLERANCES)),
    indirect=["native_library"],
    ids=str,
)
def test_a_position_has_the_same_bits_in_every_step(
    native_library: NativeLibrary, heads: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    lengths = [600, 290, 131]
    requests = Requests.make(native_library, lengths, 16, shape_of(heads, window), dtype)
    whole = requests.attend([(0, 600, 600)])[0]
    others = [(1, 1, 290), (2, 131, 131)]
    steps = [(1, 1), (1, 128), (1, 129), (1, 600), (2, 130), (7, 260), (128, 256), (150, 600), (17, 17)]
    for index, (rows, keys) in enumerate(steps):
        expected = whole[keys - rows : keys]
        # Each number of threads computes a third of the steps alone, and another third with other requests.
        alone, together = index % 3 + 1, (index + 1) % 3 + 1
        assert torch.equal(requests.attend([(0, rows, keys)], alone)[0], expected), (rows, keys)
        assert torch.equal(requests.attend([*others, (0, rows, keys)], together)[2], expected), (rows, keys)
    decodes = requests.attend([(0, 1, keys) for keys in range(1, 601, 7)], 2)
    assert torch.equal(torch.cat(decodes), whole[0:600:7])
    for block_size in (1, 8, 24, 64):
        other = Requests.make(native_library, lengths, block_size, shape_of(heads, window), dtype)
        assert torch.equal(other.attend([(0, 100, 600)], 2)[0], whole[500:]), block_size
        assert torch.equal(other.attend([(0, 100, 100)], 2)[0], whole[:100]), block_size
        assert torch.equal(other.attend([(0, 1, 555), (1, 290, 290)], 2)[0], whole[554:555]), block_size


@pytest.mark.parametrize(
    ("native_library", "heads", "window", "dtype"),
    pairwise_of_levels(LEVELS, [(9, 3, 64), (12, 12, 32), (7, 1, 12)], cases.BOTH_WAYS_WINDOWS, list(TOLERANCES)),
    indirect=["native_library"],
    ids=str,
)
def test_attention_in_both_directions(
    native_library: NativeLibrary, heads: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    shape = replace(shape_of(heads, window), is_causal=False)
    # The library "portable" is hardly optimized here; the others compile the same loops for longer requests.
    lengths = [300 if native_library.isa == "portable" else 600, 1, 290, 2, 17, 256, 257]
    parts = [(request, length, length) for request, length in enumerate(lengths)]
    requests = Requests.make(native_library, lengths, 16, shape, dtype)
    whole = requests.attend(parts, 2)
    assert_close(torch.cat(whole), requests.expected(parts), TOLERANCES[dtype])
    for num_threads in (1, 8):
        assert torch.equal(torch.cat(requests.attend(parts[::-1], num_threads)), torch.cat(whole[::-1])), num_threads
    for part, rows in zip(parts, whole, strict=True):
        assert torch.equal(requests.attend([part], 2)[0], rows), part
    other = Requests.make(native_library, lengths, 24, shape, dtype)
    assert torch.equal(torch.cat(other.attend(parts, 2)), torch.cat(whole))


def test_a_long_request_is_split_over_threads_without_changing_its_bits(native_library: NativeLibrary) -> None:
    for heads, window in (((3, 1, 32), None), ((3, 1, 32), 2000), ((3, 1, 40, 32), None)):
        shape = shape_of(heads, window)
        requests = Requests.make(native_library, [5000, 40], 16, shape, torch.bfloat16)
        expected = requests.attend([(0, 1, 5000), (1, 40, 40)], 1)
        for num_threads in (2, 3, 7):
            actual = requests.attend([(0, 1, 5000), (1, 40, 40)], num_threads)
            assert torch.equal(torch.cat(actual), torch.cat(expected))
        assert torch.equal(requests.attend([(0, 4, 5000)], 2)[0][3:], expected[0])


@pytest.mark.parametrize(
    ("native_library", "heads", "block_size", "dtype"),
    pairwise_of_levels(LEVELS, [(9, 3, 64), (5, 1, 40, 32), (4, 4, 20)], [16, 5], list(TOLERANCES)),
    indirect=["native_library"],
    ids=str,
)
def test_requests_that_share_a_prefix_have_the_bits_that_each_has_alone(
    native_library: NativeLibrary, heads: tuple[int, ...], block_size: int, dtype: torch.dtype
) -> None:
    shape = shape_of(heads)
    lengths = [700, 615, 640, 330, 600, 601, 100, 400]
    requests = Requests.make(native_library, lengths, block_size, shape, dtype)
    # Some have the whole prefix of request 0 or most of it, two the beginning alone, one nothing.
    for request, shared_keys in enumerate([0, 580, 580, 300, 580, 520, 70, 0]):
        shared = shared_keys // block_size
        requests.block_table[request, :shared] = requests.block_table[0, :shared]
    parts = [(request, 1, length) for request, length in enumerate(lengths)]
    parts += [(1, 15, 610), (2, 40, 630), (4, 2, 585), (4, 200, 600), (5, 1, 530), (3, 1, 301)]
    alone = [requests.attend([part])[0] for part in parts]
    assert_close(torch.cat(alone), requests.expected(parts), TOLERANCES[dtype])
    for order, num_threads in ((parts, 1), (parts, 8), (parts[::-1], 2), (parts[::2] + parts[1::2], 3)):
        expected = [alone[parts.index(part)] for part in order]
        assert torch.equal(torch.cat(requests.attend(order, num_threads)), torch.cat(expected)), num_threads
    for other in (shape_of(heads, 90), scored(shape, "all")[0]):
        changed = Requests(requests.cache, other, requests.block_table, requests.queries)
        expected = [changed.attend([part])[0] for part in parts]
        assert torch.equal(torch.cat(changed.attend(parts, 2)), torch.cat(expected))


def test_queries_in_bfloat16_are_as_if_they_were_rounded_here(native_library: NativeLibrary) -> None:
    requests = Requests.make(native_library, [90], 16, shape_of((6, 2, 20)), torch.bfloat16)
    rounded = Requests(requests.cache, requests.shape, requests.block_table, [requests.queries[0].bfloat16()])
    assert torch.equal(rounded.attend([(0, 30, 90)])[0], requests.attend([(0, 30, 90)])[0])


def test_output_in_bfloat16_is_rounded_once(native_library: NativeLibrary) -> None:
    requests = Requests.make(native_library, [70], 16, shape_of((6, 2, 20)), torch.bfloat16)
    exact, rounded = requests.attend([(0, 9, 70)])[0], requests.attend([(0, 9, 70)], out_dtype=torch.bfloat16)[0]
    assert torch.equal(rounded, exact.bfloat16())


def test_huge_and_tiny_scores(native_library: NativeLibrary) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        requests = Requests.make(native_library, [300], 16, shape_of((2, 1, 16)), dtype)
        for factor in (0.0, 1e-30, 300.0, 1e6):
            scaled = Requests(requests.cache, requests.shape, requests.block_table, [requests.queries[0] * factor])
            if dtype == torch.bfloat16:
                scaled.queries = [scaled.queries[0].bfloat16().float()]
            actual = scaled.attend([(0, 300, 300)])[0]
            # Scores in the thousands differ by more than the rounding of a sum changes them.
            assert_close(actual, scaled.expected([(0, 300, 300)]), 1e-2)


def test_what_cannot_be_is_refused() -> None:
    layout = CacheLayout(torch.bfloat16, 16, 2, 64)
    with pytest.raises(ValueError, match="scaled"):
        ShapeArguments.of(AttentionShape(4, 2, 64, scale=-1.0), layout)
    with pytest.raises(ValueError):
        ShapeArguments.of(AttentionShape(5, 2, 64, scale=1.0), layout)
    with pytest.raises(ValueError):
        ShapeArguments.of(AttentionShape(4, 4, 64, scale=1.0), layout)
    with pytest.raises(ValueError, match="576"):
        CacheLayout(torch.bfloat16, 16, 2, 577)
    with pytest.raises(ValueError, match="int64"):
        CacheLayout(torch.int64, 16, 2, 64)


def test_the_plan_fits_its_workspace_at_any_number_of_threads() -> None:
    native = library.load()
    requests = Requests.make(native, [900] * 6, 16, shape_of((4, 2, 16)), torch.float32)
    parts = [(0, 1, 900), (1, 300, 900), *((request, 1, 700) for request in range(2, 6))]
    expected = torch.cat(requests.attend(parts, 1))
    for num_threads in (2, 5, 16):
        assert torch.equal(torch.cat(requests.attend(parts, num_threads)), expected)
