"""Windows of Qwen2.5-VL's tower, and the largest image that workers plan memory for."""

from pathlib import Path

import numpy as np
import pytest
import tiny_media
import torch
from transformers.vision_utils import get_vision_window_index

from octavo.frontend.model_files.facts import read_model_facts
from octavo.protocol.config import EngineConfig, ModelConfig, resolve
from octavo.protocol.config.media import DEFAULT_ITEM_TOKENS, MediaConfig
from octavo.protocol.env import Env
from octavo.worker_proc.models.vision.qwen25_vl import squares_by_window
from octavo.worker_proc.models.vision.registry import build_towers
from octavo.worker_proc.models.vision.tower import MAX_RUN_SEQUENCES, MIN_RUN_ROWS, MediaTower, TowerSpec
from octavo.worker_proc.parallel.placement import Placement


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (4, 4), (5, 3), (7, 10), (8, 8)])
def test_windows_are_those_of_transformers(rows: int, columns: int) -> None:
    order_S, counts = squares_by_window(rows, columns, 4)
    grid = torch.tensor([[1, 2 * rows, 2 * columns]])
    expected, ends = get_vision_window_index(grid, spatial_merge_size=2, window_size=112, patch_size=14)
    assert order_S.tolist() == expected.tolist()
    assert (4 * counts.cumsum()).tolist() == ends.tolist()[1:]
    assert len(counts) <= rows * columns // 4 + 1, "what `max_parts` counts on"


def tower_of(path: Path, **settings: int) -> MediaTower:
    model = ModelConfig(model=str(path), dtype="float32")
    config = EngineConfig(model=model, media=MediaConfig(**settings))
    resolved = resolve(config, read_model_facts(model, Env.read()), device="cpu", num_cores=1)
    assert resolved.media is not None and resolved.model.media is not None
    placement = Placement(torch.float32, torch.device("meta"))
    sizes = resolved.model.embedding_width, placement, None, resolved.media.max_item_tokens
    return build_towers(TowerSpec(resolved.model.media, *sizes))["image"]


def test_memory_is_planned_for_the_largest_image_that_is_accepted(tmp_path: Path) -> None:
    path = tiny_media.make_qwen25_vl(tmp_path)
    tower = tower_of(path)
    assert tower.max_item_rows == 4 * DEFAULT_ITEM_TOKENS
    assert tower.max_parts == DEFAULT_ITEM_TOKENS // 2 + MAX_RUN_SEQUENCES
    assert tower_of(path, encoder_cache_tokens=100).max_rows == MIN_RUN_ROWS
    assert tower_of(path, max_num_encoder_tokens=5000).max_item_rows == 20_000
    assert np.prod(tower._inputs_XP.shape) == 4 * DEFAULT_ITEM_TOKENS * 2 * 3 * 6 * 6
