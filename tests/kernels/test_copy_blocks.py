"""`copy_blocks`: through torch and in C++, between caches and host memory."""

import itertools

import pytest
import torch
from torch import Tensor

from octavo.kernels import copy_blocks
from octavo.kernels.copy_blocks import cases, native, reference
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.native.library import NativeLibrary

CASES = list(itertools.product(cases.WIDTHS, cases.PAIRS))


def buffers_of(num_blocks: int, widths: list[int]) -> list[Tensor]:
    """Return the parts of blocks that lie together, as in host memory."""
    memory = torch.randint(256, (num_blocks, sum(widths)), dtype=torch.uint8)
    return list(memory.split(widths, dim=1))


@pytest.mark.parametrize(("widths", "pairs"), CASES)
def test_it_copies_blocks_and_nothing_else(widths: list[int], pairs: list[tuple[int, int]]) -> None:
    sources, destinations = buffers_of(7, widths), buffers_of(11, widths)
    expected = [destination.clone() for destination in destinations]
    reference.copy_blocks(sources, expected, pairs)
    copy_blocks.copy_blocks(sources, destinations, pairs)
    for ours, wanted in zip(destinations, expected, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_copies(native_library: NativeLibrary, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MIN_THREAD_BYTES", 1)
    for widths, pairs in CASES:
        sources, destinations = buffers_of(7, widths), [each.clone() for each in buffers_of(11, widths)]
        expected = [destination.clone() for destination in destinations]
        reference.copy_blocks(sources, expected, pairs)
        native.copy_blocks(native_library, sources, destinations, pairs, num_threads)
        for ours, wanted in zip(destinations, expected, strict=True):
            assert torch.equal(ours, wanted)


def test_what_is_swapped_out_comes_back() -> None:
    cache = [torch.randint(256, (5, width), dtype=torch.uint8) for width in (64, 8)]
    before, host_PB = [buffer.clone() for buffer in cache], torch.zeros(3, 72, dtype=torch.uint8)
    parts = copy_blocks.parts_of(host_PB, cache)
    copy_blocks.copy_blocks(cache, parts, [(4, 0), (1, 2)])
    copy_blocks.copy_blocks(parts, cache, [(0, 3), (2, 0)])
    for buffer, old in zip(cache, before, strict=True):
        assert torch.equal(buffer, old[[1, 1, 2, 4, 4]])


def test_buffers_of_other_widths_are_rejected() -> None:
    with pytest.raises(ShapeError, match="copy_blocks"):
        copy_blocks.copy_blocks(buffers_of(2, [8]), buffers_of(2, [16]), [(0, 0)])
    with pytest.raises(ShapeError, match="copy_blocks"):
        copy_blocks.copy_blocks([torch.zeros(2, 8)], buffers_of(2, [8]), [(0, 0)])
