"""`paged_attention`: right, and the same for a position in any step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import assert_close
from paged_requests import Paged, paged, scored
from pairwise import pairwise
from torch import Tensor

from octavo.kernels import paged_attention
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.paged_attention import AttentionShape, cases, reference

HEADS = [*cases.HEADS, (16, 1, 24, 20)]
"""The last one has values that are parts of keys."""


def shape_of(heads: tuple[int, ...], window: int | None = None) -> AttentionShape:
    return AttentionShape(*heads[:3], heads[2] ** -0.5, window, key_value_dim=heads[3] if len(heads) > 3 else None)


def attend(
    data: Paged,
    parts: list[tuple[int, int, int]],
    block_size: int,
    shape: AttentionShape,
    sinks: Tensor | None = None,
    is_span_R: list[bool] | None = None,
) -> list[Tensor]:
    """Attend for (request, rows, keys) triples in one step; returns each one's rows."""
    rows = [num_rows for _, num_rows, _ in parts]
    starts = [sum(rows[:index]) for index in range(len(rows) + 1)]
    queries = torch.cat([data.queries[request][keys - num : keys] for request, num, keys in parts])
    tables = data.block_table[[request for request, _, _ in parts]]
    step = paged_attention.plan(starts, [keys for _, _, keys in parts], tables, block_size, shape, is_span_R)
    return list(step(queries, data.k_cache, data.v_cache, sinks_N=sinks).split(rows))


@pytest.mark.parametrize(
    ("heads", "batch", "window", "dtype", "scoring"),
    pairwise(HEADS, cases.BATCHES, cases.WINDOWS, list(cases.TOLERANCES), cases.SCORINGS),
    ids=str,
)
def test_paged_attention(
    heads: tuple[int, ...], batch: list[tuple[int, int]], window: int | None, dtype: torch.dtype, scoring: str
) -> None:
    shape, sinks = scored(shape_of(heads, window), scoring)
    for block_size in cases.BLOCK_SIZES:
        data = paged([keys for _, keys in batch], block_size, shape, dtype)
        parts = [(request, rows, keys) for request, (rows, keys) in enumerate(batch)]
        actual = torch.cat(attend(data, parts, block_size, shape, sinks))
        queries = torch.cat([data.queries[request][keys - rows : keys] for request, rows, keys in parts])
        starts = [sum(rows for rows, _ in batch[:index]) for index in range(len(batch) + 1)]
        expected = reference.paged_attention(
            queries,
            data.k_cache,
            data.v_cache,
            starts,
            [keys for _, keys in batch],
            data.block_table,
            shape,
            sinks_N=sinks,
        )
        assert_close(actual, expected, cases.TOLERANCES[dtype])


@pytest.mark.parametrize(("heads", "window", "dtype"), pairwise(HEADS, [None, 6, 150], list(cases.TOLERANCES)), ids=str)
def test_rows_of_a_span_see_the_keys_after_them(heads: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    shape = shape_of(heads, window)
    data = paged([400, 90], 16, shape, dtype)
    parts, is_span_R = [(0, 270, 270), (0, 80, 350), (0, 50, 400), (1, 90, 90)], [False, True, False, True]
    whole = attend(data, parts, 16, shape, is_span_R=is_span_R)
    queries = torch.cat([data.queries[request][keys - rows : keys] for request, rows, keys in parts])
    expected = reference.paged_attention(
        queries,
        data.k_cache,
        data.v_cache,
        [0, 270, 350, 400, 490],
        [270, 350, 400, 90],
        data.block_table[[0, 0, 0, 1]],
        shape,
        is_span_R=is_span_R,
    )
    assert_close(torch.cat(whole), expected, cases.TOLERANCES[dtype])
    rest, text = attend(data, [(0, 33, 350), (0, 50, 400)], 16, shape, is_span_R=[True, False])
    assert torch.equal(rest, whole[1][-33:]) and torch.equal(text, whole[2])


@pytest.mark.parametrize(
    ("heads", "window", "dtype", "scoring"),
    pairwise(HEADS, [None, 150], list(cases.TOLERANCES), ["plain", "all"]),
    ids=str,
)
def test_a_position_has_the_same_bits_in_every_step(
    heads: tuple[int, ...], window: int | None, dtype: torch.dtype, scoring: str
) -> None:
    shape, sinks = scored(shape_of(heads, window), scoring)
    data = paged([400, 290, 131], 16, shape, dtype)
    whole = attend(data, [(0, 400, 400)], 16, shape, sinks)[0]
    others = [(1, 1, 290), (2, 131, 131)]
    for rows, keys in [(1, 1), (1, 128), (1, 129), (1, 400), (2, 130), (7, 260), (128, 256), (300, 400), (17, 17)]:
        expected = whole[keys - rows : keys]
        assert torch.equal(attend(data, [(0, rows, keys)], 16, shape, sinks)[0], expected), (rows, keys)
        assert torch.equal(attend(data, [*others, (0, rows, keys)], 16, shape, sinks)[2], expected), (rows, keys)
    decodes = attend(data, [(0, 1, keys) for keys in range(1, 401, 3)], 16, shape, sinks)
    assert torch.equal(torch.cat(decodes), whole[0:400:3])


@pytest.mark.parametrize(
    ("heads", "window", "dtype"), pairwise(cases.HEADS, cases.BOTH_WAYS_WINDOWS, list(cases.TOLERANCES)), ids=str
)
def test_attention_in_both_directions(heads: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    shape = replace(shape_of(heads, window), is_causal=False)
    lengths = [300, 1, 129, 40, 128]
    for block_size in cases.BLOCK_SIZES:
        data = paged(lengths, block_size, shape, dtype)
        parts = [(request, length, length) for request, length in enumerate(lengths)]
        actual = attend(data, parts, block_size, shape)
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        caches = data.k_cache, data.v_cache
        expected = reference.paged_attention(torch.cat(data.queries), *caches, starts, lengths, data.block_table, shape)
        assert_close(torch.cat(actual), expected, cases.TOLERANCES[dtype])
        for part, rows in zip(parts, actual, strict=True):
            assert torch.equal(attend(data, [part], block_size, shape)[0], rows)


def test_what_attention_in_both_directions_does_not_go_with() -> None:
    every: list[dict[str, Any]] = [{"slopes": (0.5, 0.5)}, {"window": 4, "is_chunked": True}, {"key_value_dim": 4}]
    for options in every:
        with pytest.raises(ValueError, match="both directions"):
            AttentionShape(2, 1, 8, 1.0, is_causal=False, **options)


def test_groups_of_tiles_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(9, 3, 64, scale=0.125)
    data = paged([400, 290], 16, shape, torch.float32)
    parts = [(0, 300, 400), *((1, 1, keys) for keys in range(1, 290, 7))]
    expected = torch.cat(attend(data, parts, 16, shape))
    monkeypatch.setattr("octavo.kernels.paged_attention.cpu._MAX_SCORES", 1)
    monkeypatch.setattr("octavo.kernels.paged_attention.cpu._MAX_KEY_NUMBERS", 1)
    assert torch.equal(torch.cat(attend(data, parts, 16, shape)), expected)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("window", [1, 20, 150])
@pytest.mark.parametrize("block_size", [16, 24])
def test_blocks_that_a_window_has_passed_are_not_read(window: int, block_size: int, is_chunked: bool) -> None:
    shape = AttentionShape(6, 2, 16, scale=0.25, window=window, is_chunked=is_chunked)
    data = paged([400], block_size, shape, torch.float32)
    for rows, keys in ((1, 400), (1, 257), (40, 300), (144, 400)):
        lost = data.without(0, shape.first_key(keys - rows), block_size)
        expected = attend(data, [(0, rows, keys)], block_size, shape)[0]
        queries = data.queries[0][keys - rows : keys]
        caches = data.k_cache, data.v_cache
        wanted = reference.paged_attention(queries, *caches, [0, rows], [keys], data.block_table, shape)
        assert_close(expected, wanted, cases.TOLERANCES[torch.float32])
        assert torch.equal(attend(lost, [(0, rows, keys)], block_size, shape)[0], expected)


def test_plan_refuses_lengths_that_contradict_each_other() -> None:
    shape = AttentionShape(4, 2, 8, scale=1.0)
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ShapeError):
        paged_attention.plan([0, 5], [4], table, 16, shape)
    with pytest.raises(ShapeError):
        paged_attention.plan([0, 5], [33], table, 16, shape)
    with pytest.raises(ShapeError):
        paged_attention.plan([0, 5, 6], [5], table, 16, shape)
    with pytest.raises(ShapeError):
        paged_attention.plan([0, 5], [5], table, 16, AttentionShape(5, 2, 8, scale=1.0))


def test_a_cpu_refuses_what_only_gpus_compute() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    step = paged_attention.plan([0, 1], [1], table, 16, AttentionShape(4, 2, 8, scale=1.0))
    cache = torch.zeros(1, 16, 2, 8)
    with pytest.raises(ShapeError, match="no caches with scales"):
        step(torch.zeros(1, 4, 8), cache, cache, k_scale=0.5)
