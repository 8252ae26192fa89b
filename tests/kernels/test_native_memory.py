"""Mapped memory: aligned, zeroed, shared with files, and freed with the last tensor."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from octavo.kernels.native.memory import ALIGNMENT, HUGE_PAGE_BYTES, SLAB_BYTES, SMALL_PAGE_BYTES, allocate, map_file


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5, SLAB_BYTES, SLAB_BYTES + 7]
)
def test_allocate_gives_zeros(num_bytes: int) -> None:
    buffer = allocate(num_bytes)
    assert buffer.dtype == torch.uint8 and buffer.shape == (num_bytes,)
    assert not buffer.any()
    buffer.fill_(7)
    assert int(buffer.long().sum()) == 7 * num_bytes


def test_large_buffers_begin_at_a_huge_page() -> None:
    assert allocate(SLAB_BYTES).data_ptr() % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("num_small_pages", [1, 255, 511])
def test_a_large_buffer_begins_elsewhere_in_a_huge_page_on_request(num_small_pages: int) -> None:
    page_offset = num_small_pages * SMALL_PAGE_BYTES
    before = _resident_bytes()
    buffer = allocate(SLAB_BYTES, page_offset)
    assert buffer.data_ptr() % HUGE_PAGE_BYTES == page_offset and len(buffer) == SLAB_BYTES
    buffer[0] = 1
    assert _resident_bytes() - before < HUGE_PAGE_BYTES, "nothing is allocated before it"
    buffer.fill_(7)
    assert int(buffer.long().sum()) == 7 * SLAB_BYTES


def test_untouched_memory_is_not_resident() -> None:
    before = _resident_bytes()
    buffer = allocate(1 << 30)
    buffer[:10] = 1
    assert _resident_bytes() - before < 1 << 28


def test_memory_is_given_back_with_the_last_view() -> None:
    num_bytes = 256 << 20
    view = allocate(num_bytes).fill_(1).view(torch.float32)[5:]
    gc.collect()
    assert float(view[0]) != 0
    with_buffer = _resident_bytes()
    del view
    gc.collect()
    assert with_buffer - _resident_bytes() > num_bytes * 0.9


def test_too_much_memory_is_an_error() -> None:
    with pytest.raises(MemoryError, match="no memory for"):
        allocate(1 << 62)


def test_small_buffers_share_pages_and_nothing_else() -> None:
    sizes = [1, 64, 100, 3_000_000, 15_000_000, 15_000_000, 5]
    buffers = [allocate(size).fill_(number) for number, size in enumerate(sizes, 1)]
    assert all(buffer.data_ptr() % ALIGNMENT == 0 for buffer in buffers)
    for number, buffer in enumerate(buffers, 1):
        assert bool((buffer == number).all())
        assert buffer.untyped_storage().nbytes() == len(buffer)
    assert buffers[1].data_ptr() == buffers[0].data_ptr() + ALIGNMENT


def test_threads_get_buffers_of_their_own() -> None:
    with ThreadPoolExecutor(8) as threads:
        buffers = list(threads.map(lambda number: allocate(50_000).fill_(number % 251), range(2000)))
    assert all(bool((buffer == number % 251).all()) for number, buffer in enumerate(buffers))


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 10_000), (1, 5), (4096, 4096), (5000, 5000), (9999, 0)])
def test_map_file_is_the_part_of_the_file(tmp_path: Path, offset: int, num_bytes: int) -> None:
    content = bytes(i * 7 % 251 for i in range(10_000))
    (tmp_path / "file").write_bytes(content)
    part = map_file(tmp_path / "file", offset, num_bytes)
    assert bytes(part.tolist()) == content[offset : offset + num_bytes]


def test_writing_to_a_mapped_file_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    map_file(path, 0, 100).fill_(1)
    assert path.read_bytes() == bytes(100)


def test_a_mapped_file_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    part = map_file(path, 0, 3)
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").replace(path)
    assert bytes(part.tolist()) == b"old"


def test_a_file_too_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="has 10 bytes, not 11"):
        map_file(tmp_path / "file", 1, 10)


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
