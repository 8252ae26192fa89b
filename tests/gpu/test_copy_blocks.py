"""`copy_blocks` on a GPU: within a cache, to pinned host memory and back."""

import itertools

import pytest
import torch

from octavo.kernels.copy_blocks import cases, gpu, parts_of, reference


@pytest.mark.parametrize("is_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(("widths", "pairs"), list(itertools.product(cases.WIDTHS, cases.PAIRS[1:])))
def test_copy_blocks(
    device: torch.device, seed: int, widths: list[int], pairs: list[tuple[int, int]], *, is_host: bool
) -> None:
    torch.manual_seed(seed)
    cache = [torch.randint(256, (7, width), dtype=torch.uint8) for width in widths]
    other = torch.randint(256, (11, sum(widths)), dtype=torch.uint8)
    expected, back = other.clone(), [torch.zeros_like(buffer) for buffer in cache]
    reference.copy_blocks(cache, parts_of(expected, cache), pairs)
    pairs_back = [(destination, source) for source, destination in dict(pairs).items()]
    reference.copy_blocks(parts_of(expected, cache), back, pairs_back)

    on_device = [buffer.to(device) for buffer in cache]
    there = other.pin_memory() if is_host and device.type != "cpu" else other.to(device)
    gpu.copy_blocks(on_device, parts_of(there, cache), pairs)
    returned = [torch.zeros_like(buffer) for buffer in on_device]
    gpu.copy_blocks(parts_of(there, cache), returned, pairs_back)
    for ours, wanted in zip(returned, back, strict=True):
        assert torch.equal(ours.cpu(), wanted)
    assert torch.equal(there.cpu(), expected)
