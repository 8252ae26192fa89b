"""Blocks of a cache in files: what one worker saves, another one of the same layout loads."""

from pathlib import Path

import pytest
import torch

from octavo.protocol.kv_transfer import rank_file
from octavo.protocol.worker_commands import LoadBlockFiles, SaveBlockFiles
from octavo.worker_proc.cache.block_files import BlockFiles

NUM_BLOCKS = 6


def caches(fill: float) -> list[torch.Tensor]:
    """Return buffers of different types and widths, all blocks of which differ."""
    wide = torch.arange(NUM_BLOCKS * 12, dtype=torch.float32).reshape(NUM_BLOCKS, 3, 4) + fill
    return [wide, wide.to(torch.bfloat16).contiguous(), wide.to(torch.int8)[:, 0].contiguous()]


def test_blocks_arrive_where_they_are_wanted(tmp_path: Path) -> None:
    given, taken = caches(1.0), caches(90.0)
    before = [buffer.clone() for buffer in taken]
    path = str(tmp_path / "blocks")
    assert BlockFiles(given, NUM_BLOCKS).apply(SaveBlockFiles(0, path, [4, 0, 2]), 1) == ""
    assert BlockFiles(taken, NUM_BLOCKS).apply(LoadBlockFiles(0, path, [(0, 5), (2, 1)]), 1) == ""
    for source, target, old in zip(given, taken, before, strict=True):
        assert torch.equal(target[5], source[4]) and torch.equal(target[1], source[2])
        assert all(torch.equal(target[block], old[block]) for block in (0, 2, 3, 4))


def test_states_lie_behind_blocks(tmp_path: Path) -> None:
    given, taken = caches(1.0), caches(90.0)
    before = [buffer.clone() for buffer in taken]
    path = str(tmp_path / "blocks")
    files, others = (BlockFiles(each[:2], NUM_BLOCKS, each[2:], NUM_BLOCKS) for each in (given, taken))
    assert files.apply(SaveBlockFiles(0, path, [4, 0], [2, 5]), 0) == ""
    assert others.apply(LoadBlockFiles(0, path, [(0, 5)], [(1, 3)], 2), 0) == ""
    for source, target, old in zip(given[:2], taken[:2], before, strict=False):
        assert torch.equal(target[5], source[4])
        assert torch.equal(target[:5], old[:5])
    assert torch.equal(taken[2][3], given[2][5])
    assert all(torch.equal(taken[2][slot], before[2][slot]) for slot in (0, 1, 2, 4, 5))
    with pytest.raises(ValueError, match="2 blocks of 72 and 3 states of 4 were expected"):
        others.apply(LoadBlockFiles(0, path, [(0, 5)], [(2, 3)], 2), 0)


def test_a_stage_without_a_cache_has_empty_files(tmp_path: Path) -> None:
    files, path = BlockFiles([], NUM_BLOCKS), str(tmp_path / "blocks")
    assert files.apply(SaveBlockFiles(0, path, [1]), 0) == ""
    assert Path(rank_file(path, 0)).stat().st_size == 0
    assert files.apply(LoadBlockFiles(0, path, [(0, 1)]), 0) == ""


def test_a_fault_of_saving_is_told_and_one_of_loading_ends_the_worker(tmp_path: Path) -> None:
    files = BlockFiles(caches(1.0), NUM_BLOCKS)
    assert "No such file" in files.apply(SaveBlockFiles(0, str(tmp_path / "missing" / "blocks"), [1]), 0)
    path = str(tmp_path / "blocks")
    assert files.apply(SaveBlockFiles(0, path, [1]), 0) == ""
    assert "exists" in files.apply(SaveBlockFiles(0, path, [1]), 0)
    with pytest.raises(ValueError, match="2 blocks of 76 and 0 states of 0 were expected"):
        files.apply(LoadBlockFiles(0, path, [(1, 1)]), 0)
    with pytest.raises(FileNotFoundError):
        files.apply(LoadBlockFiles(0, path, [(0, 1)]), 1)
