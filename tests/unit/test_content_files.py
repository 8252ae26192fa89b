"""Files of KV blocks: whole or missing, bounded, shared."""

import errno
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from core_fakes import FakeEngine
from waiting import TIMEOUT_S, wait_until

from octavo.core_proc import core, file_watch
from octavo.core_proc.cache.files import FileTier
from octavo.core_proc.core import EngineCore
from octavo.core_proc.file_store import open_files
from octavo.core_proc.file_watch import FileWatch
from octavo.protocol.block_packs import MAX_CONTENTS, list_packs, pack_name, pack_path
from octavo.protocol.errors import StartupError
from octavo.protocol.worker_commands import LoadBlocks, StoreBlocks
from octavo.worker_proc.cache.block_loader import BlockLoader, FinishedTransfer
from octavo.worker_proc.cache.content_files import ContentFiles
from octavo.worker_proc.cache.host_blocks import HostBlocks
from octavo.worker_proc.runners.host import CompletedEvent

KEYS = [bytes([index]) * 32 + b"\x01" * (index % 2) for index in range(5)]
CONTENTS = [bytes(range(256)) * 40, *(bytes([index]) * 10240 for index in range(4))]


def write(folder: Path, keys: Sequence[bytes] = KEYS, contents: Sequence[bytes] = CONTENTS) -> Path:
    """Write one pack; returns its path."""
    pairs = list(zip(keys, map(memoryview, contents), strict=False))
    assert ContentFiles(0).write_all(str(folder), pairs) == [True] * len(keys)
    return pack_path(folder / "0", pack_name(keys))


def read(folder: Path, keys: Sequence[bytes] = KEYS, files: ContentFiles | None = None) -> list[bytes | None]:
    rows = [bytearray(len(CONTENTS[0])) for _ in keys]
    pairs = list(zip(keys, map(memoryview, rows), strict=True))
    found = (files or ContentFiles(0)).read_all(str(folder), pairs)
    return [bytes(row) if is_there else None for row, is_there in zip(rows, found, strict=True)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 0, 1, 3], [2]])
def test_what_was_written_is_read(order: list[int], tmp_path: Path) -> None:
    write(tmp_path)
    assert read(tmp_path, [KEYS[index] for index in order]) == [CONTENTS[index] for index in order]


def test_contents_of_several_packs_and_missing_ones(tmp_path: Path) -> None:
    files = ContentFiles(0)
    write(tmp_path, KEYS[:2], CONTENTS[:2])
    assert read(tmp_path, KEYS, files) == [*CONTENTS[:2], None, None, None]
    path = write(tmp_path, KEYS[2:4], CONTENTS[2:4])  # by another engine
    assert read(tmp_path, KEYS, files) == [*CONTENTS[:4], None]
    path.unlink()
    assert read(tmp_path, KEYS, files) == [*CONTENTS[:2], None, None, None]


def test_many_contents_are_divided_among_packs(tmp_path: Path) -> None:
    keys = [bytes([index]) * 32 for index in range(MAX_CONTENTS + 1)]
    contents = [bytes([index]) * 10240 for index in range(len(keys))]
    pairs = list(zip(keys, map(memoryview, contents), strict=True))
    files = ContentFiles(0)
    assert all(files.write_all(str(tmp_path), pairs))
    assert len(list(list_packs(tmp_path / "0"))) == 2
    assert read(tmp_path, keys, files) == contents


DAMAGE = {
    "torn": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "short header": lambda data: data[:10],
    "lost pages": lambda data: data[:8192] + bytes(4096) + data[12288:],
    "flipped": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "another key": lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
    "longer": lambda data: data + b"x",
    "other magic": lambda data: b"x" + data[1:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_missing_and_deleted(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    assert read(tmp_path)[0] is None
    assert not path.exists()
    write(tmp_path)
    assert read(tmp_path) == CONTENTS


def test_a_file_that_is_damaged_later_is_deleted(tmp_path: Path) -> None:
    path, files = write(tmp_path), ContentFiles(0)
    assert read(tmp_path, KEYS, files) == CONTENTS
    path.write_bytes(path.read_bytes()[:20000])
    assert read(tmp_path, KEYS, files)[1:] == [None] * 4
    assert not path.exists()


def test_a_file_under_the_name_of_another_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.rename(write(tmp_path, KEYS[:1], CONTENTS[1:2]))
    assert read(tmp_path, KEYS[:1]) == [None]


def test_blocks_that_cannot_be_written_are_missing(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("no folder")
    assert ContentFiles(0).write_all(str(tmp_path), [(KEYS[0], memoryview(CONTENTS[0]))]) == [False]
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


@pytest.mark.parametrize("is_damaged", [False, True])
def test_states_go_to_packs_of_their_own_and_back_to_host_memory(is_damaged: bool, tmp_path: Path) -> None:
    blocks = [torch.zeros(6, 8, dtype=torch.uint8)]
    states = [torch.arange(60, dtype=torch.float32).view(3, 20), torch.arange(3, dtype=torch.float32).view(3, 1)]
    host = HostBlocks(states, 3, 2, num_staging_rows=2)
    loader = BlockLoader(HostBlocks(blocks, 6, 0, num_staging_rows=5), ContentFiles(0), host)
    keys = [bytes([index]) * 33 for index in range(3)]

    def finish() -> FinishedTransfer:
        wait_until(lambda: all(transfer.done() for transfer in loader._transfers))
        (finished,) = loader.take_finished()
        return finished

    loader.store(StoreBlocks(3, [(2, keys[0]), (1, keys[1]), (0, keys[2])], str(tmp_path), True), CompletedEvent)
    assert finish().missing == [0], "there are rows for two"
    packs = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert len(packs) == 2
    if is_damaged:
        with packs[0].open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    before = [buffer.clone() for buffer in states]
    for buffer in states:
        buffer.zero_()
    command = LoadBlocks(4, folder=str(tmp_path), states_from_files=[(keys[0], 1), (keys[1], 0)])
    loader.load(command, CompletedEvent())
    missing = finish().missing_states
    assert len(missing) == is_damaged
    host.apply([], [(place, slot) for place, slot in ((1, 2), (0, 1)) if place not in missing])
    for buffer, old in zip(states, before, strict=True):
        assert all(buffer[slot].equal(old[slot]) for place, slot in ((1, 2), (0, 1)) if place not in missing)
        assert not buffer[0].any()
    loader.close()


class TestWatch:
    def test_it_finds_packs_and_deletes_the_oldest(self, tmp_path: Path) -> None:
        folder = tmp_path / "ab12"
        keys = [bytes([index]) * 32 for index in range(20)]
        paths = [write(folder, keys[index : index + 2]) for index in range(0, 20, 2)]
        for age, path in enumerate(paths):
            os.utime(path, (age, age))
        size = paths[0].stat().st_size
        (tmp_path / "notes.txt").write_text("not ours")
        watch = FileWatch(tmp_path, folder, 8 * size)
        assert watch.wait_listed(TIMEOUT_S)
        (changes,) = watch.take()
        assert changes.added == keys[6:]
        paths[5].unlink()
        watch.delete([keys[14]])
        wait_until(lambda: watch._changes)
        (changes,) = watch.take()
        assert changes.removed == [*keys[10:12], *keys[14:16]]
        assert not paths[7].exists()
        assert (tmp_path / "notes.txt").exists()
        watch.close()

    def test_damaged_packs_are_not_reported(self, tmp_path: Path) -> None:
        folder = tmp_path / "ab12"
        torn, whole = write(folder, KEYS[:1]), write(folder, KEYS[1:2])
        torn.write_bytes(torn.read_bytes()[:5000])
        watch = FileWatch(tmp_path, folder, 10**9)
        wait_until(lambda: watch._changes)
        (changes,) = watch.take()
        assert changes.added == KEYS[1:2]
        assert not torn.exists()
        assert whole.exists()
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

    def test_it_lists_again_at_once_when_it_is_told_to(self, tmp_path: Path) -> None:
        folder = tmp_path / "ab12"
        watch = FileWatch(tmp_path, folder, 10**9)
        assert watch.wait_listed(TIMEOUT_S) and not watch.take()
        write(folder, KEYS[:2])  # by workers that died before they could say so
        watch.list_soon()
        wait_until(lambda: watch._changes)
        (changes,) = watch.take()
        assert changes.added == KEYS[:2]
        watch.close()

    def test_what_must_be_deleted_is_deleted_after_a_failed_attempt(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, errors = tmp_path / "ab12", [OSError(errno.ESTALE, "stale")]
        path, scandir = write(folder, KEYS[:2]), os.scandir
        watch = FileWatch(tmp_path, folder, 10**9)
        wait_until(watch.take)
        monkeypatch.setattr(file_watch, "RETRY_S", 0.01)
        monkeypatch.setattr(file_watch.os, "scandir", lambda path: fail(errors.pop()) if errors else scandir(path))
        watch.delete(KEYS[:1])
        (changes,) = wait_until(watch.take)
        assert (changes.removed, path.exists(), errors) == (KEYS[:2], False, [])
        watch.close()

    def test_a_pack_that_cannot_be_deleted_hides_no_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, unlink, is_stuck = tmp_path / "ab12", Path.unlink, True
        stuck, damaged = write(folder, KEYS[:2]), write(folder, KEYS[4:])
        abandoned = stuck.with_name(f".{stuck.name}.1")
        abandoned.touch()
        damaged.write_bytes(b"")
        for path in (abandoned, stuck):
            os.utime(path, (1, 1))

        def refuse(path: Path, missing_ok: bool = False) -> None:
            if is_stuck and path in (stuck, damaged, abandoned):
                raise PermissionError(errno.EACCES, "refused")
            unlink(path, missing_ok)

        monkeypatch.setattr(file_watch, "RETRY_S", 0.01)
        monkeypatch.setattr(Path, "unlink", refuse)
        watch = FileWatch(tmp_path, folder, 10**9)
        assert [change.added for change in wait_until(watch.take)] == [KEYS[:2]]
        watch.delete(KEYS[:1])
        assert [change.removed for change in wait_until(watch.take)] == [KEYS[:1]]
        write(folder, KEYS[2:3])  # by another engine
        assert [change.added for change in wait_until(watch.take)] == [KEYS[2:3]]
        watch._max_bytes = stuck.stat().st_size
        watch.list_soon()
        assert [change.removed for change in wait_until(watch.take)] == [KEYS[2:3]], "another one is deleted"
        watch._max_bytes = 10**9
        is_stuck = False
        assert [change.removed for change in wait_until(watch.take)] == [KEYS[1:2]]
        assert not stuck.exists()
        watch.list_soon()
        wait_until(lambda: not abandoned.exists() and not damaged.exists())
        watch.close()


def fail(error: Exception) -> NoReturn:
    raise error


def test_a_core_that_replaces_another_serves_while_a_slow_directory_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are computed, and later ones find the files. Whoever opens a pipe waits for somebody who writes."""
    monkeypatch.setattr(core, "RESTART_LIST_S", 0.01)
    other = FakeEngine(kv_offloading_path="/files")
    expected = [other.submit(f"r{number}", [number] * 33) for number in range(2)]
    other.run()
    write(tmp_path / "ab12", list(other.files), [b"x"] * len(other.files))
    slow = pack_path(tmp_path / "ab12" / "0", "0" * 32)
    slow.parent.mkdir(exist_ok=True)
    os.mkfifo(slow)
    watch = FileWatch(tmp_path, tmp_path / "ab12", 10**9)
    engine = FakeEngine(kv_offloading_path="/files", watch=watch)
    engine.files.update(other.files)
    fields = {"_spec": SimpleNamespace(predecessor_dir="/dead"), "_reporter": SimpleNamespace(phase=nullcontext)}
    EngineCore._find_files(cast(Any, SimpleNamespace(**fields)), watch, engine.scheduler)
    first = engine.submit("computed", [0] * 33)
    engine.run()
    assert not watch.wait_listed(0)
    slow.open("wb").close()
    assert watch.wait_listed(TIMEOUT_S)
    engine.scheduler.hooks.on_step()  # the loop: `wake_fds` have woken it
    second = engine.submit("found", [1] * 33)
    engine.run()
    assert [first.num_cached_tokens, second.num_cached_tokens] == [0, 32]
    assert [first.token_ids, second.token_ids] == [output.token_ids for output in expected]
    watch.close()


def test_what_lost_workers_have_written_is_found() -> None:
    engine = FakeEngine(kv_offloading_path="/files")
    engine.submit("a", [1] * 33)
    while not engine.loads:
        engine.turn()
    assert engine.files, "but no answer has come"
    engine.abort("a")
    engine.replace_worker()
    engine.plan()
    assert engine.scheduler.cache.files is not None
    assert len(engine.scheduler.cache.files) == len(engine.files)
    engine.run()


def test_the_first_keys_make_place() -> None:
    files = FileTier(max_contents=3)
    files.change([b"a", b"b", b"c"], [])
    files.change([b"a", b"d"], [])
    assert [key in files for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    files.change([], [b"c"])
    assert len(files) == 2


def test_a_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="--kv-offloading-path"):
        open_files(tmp_path / "file", "ab12", 1)
