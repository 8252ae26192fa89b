"""Files of KV blocks: whole or missing, bounded, shared."""

import os
from pathlib import Path

import pytest
import torch
from waiting import wait_until

from octavo.core_proc.file_store import open_files
from octavo.core_proc.file_watch import FileWatch
from octavo.protocol.errors import StartupError
from octavo.protocol.steps import LoadBlocks, StoreBlocks
from octavo.worker_proc.cache.block_loader import BlockLoader, FinishedTransfer
from octavo.worker_proc.cache.content_files import ContentFiles
from octavo.worker_proc.cache.host_blocks import HostBlocks
from octavo.worker_proc.runners.host import CompletedEvent

KEY, OTHER = bytes(range(32)), bytes(range(1, 33)) + b"\x01"
CONTENT = bytes(range(256)) * 40


def write(folder: Path, key: bytes = KEY, content: bytes = CONTENT) -> Path:
    assert ContentFiles(0).write(str(folder), key, memoryview(content))
    return folder / "0" / key.hex()[:2] / key.hex()


def read(folder: Path, key: bytes = KEY, num_bytes: int = len(CONTENT)) -> bytes | None:
    content = bytearray(num_bytes)
    return bytes(content) if ContentFiles(0).read(str(folder), key, memoryview(content)) else None


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for key in (KEY, OTHER):
        write(tmp_path, key)
        assert read(tmp_path, key) == CONTENT
    assert read(tmp_path, KEY[::-1]) is None


DAMAGE = {
    "torn": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "short header": lambda data: data[:10],
    "flipped": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "longer": lambda data: data + b"x",
    "other magic": lambda data: b"x" + data[1:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_missing_and_deleted(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    assert read(tmp_path) is None
    assert not path.exists()
    write(tmp_path)
    assert read(tmp_path) == CONTENT


def test_a_file_under_the_name_of_another_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.rename(write(tmp_path, OTHER))
    assert read(tmp_path, OTHER) is None


def test_a_block_that_cannot_be_written_is_missing(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("no folder")
    assert not ContentFiles(0).write(str(tmp_path), KEY, memoryview(CONTENT))
    assert not list(tmp_path.rglob(".*"))


def test_blocks_go_to_files_and_back(tmp_path: Path) -> None:
    cache = [torch.arange(48, dtype=torch.uint8).view(6, 8), torch.arange(48, 96, dtype=torch.uint8).view(6, 8)]
    before = [buffer.clone() for buffer in cache]
    loader = BlockLoader(HostBlocks(cache, 6, 0, num_staging_rows=5), ContentFiles(0))
    keys = [bytes([index]) * 32 for index in range(6)]

    def finish() -> FinishedTransfer:
        wait_until(lambda: all(transfer.done() for transfer in loader._transfers))
        (finished,) = loader.take_finished()
        return finished

    loader.store(StoreBlocks(3, [(index, keys[index]) for index in range(6)], str(tmp_path)), CompletedEvent)
    stored = finish()
    assert (stored.sequence, stored.missing) == (3, [4, 5])  # there are rows for four
    for buffer in cache:
        buffer.zero_()
    pairs = [(keys[index], index) for index in (3, 4, 1, 0)]
    loader.load(LoadBlocks(4, from_files=pairs, folder=str(tmp_path)), CompletedEvent())
    assert finish().missing == [4]
    for buffer, old in zip(cache, before, strict=True):
        assert buffer[[0, 1, 3]].equal(old[[0, 1, 3]])
        assert not buffer[[2, 4, 5]].any()
    loader.close()


class TestWatch:
    def test_it_finds_files_and_deletes_the_oldest(self, tmp_path: Path) -> None:
        folder = tmp_path / "ab12"
        paths = [write(folder, bytes([index]) * 32) for index in range(10)]
        for age, path in enumerate(paths):
            os.utime(path, (age, age))
        size = paths[0].stat().st_size
        (tmp_path / "notes.txt").write_text("not ours")
        watch = FileWatch(tmp_path, folder, 8 * size)
        wait_until(lambda: watch._changes)
        (changes,) = watch.take()
        assert changes.added == [bytes([index]) * 32 for index in range(3, 10)]
        paths[5].unlink()
        watch.delete([bytes([7]) * 32])
        wait_until(lambda: watch._changes)
        (changes,) = watch.take()
        assert changes.removed == [bytes([5]) * 32, bytes([7]) * 32]
        assert not paths[7].exists()
        assert (tmp_path / "notes.txt").exists()
        watch.close()

    def test_files_without_a_writer_are_deleted(self, tmp_path: Path) -> None:
        path = write(tmp_path / "ab12")
        abandoned, fresh = (path.with_name(f".{path.name}.{number}") for number in (1, 2))
        abandoned.touch()
        os.utime(abandoned, (1, 1))
        fresh.touch()
        watch = FileWatch(tmp_path, tmp_path / "ab12", 10**9)
        wait_until(lambda: watch._changes)
        assert not abandoned.exists()
        assert fresh.exists()
        watch.close()


def test_a_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="--kv-offloading-path"):
        open_files(tmp_path / "file", "ab12", 1)
