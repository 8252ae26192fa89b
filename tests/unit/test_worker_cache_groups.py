"""How the layers of a model are divided into cache groups."""

import pytest
import torch

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.cache.groups import (
    MAX_GROUPS,
    StateGroup,
    StateShape,
    group_layers,
    key_sizes,
    max_group_layers,
)
from octavo.worker_proc.cache.states import StateStorage


def shapes(windows: str) -> list[AttentionShape]:
    """Return the attention of each layer: "w" with a window, "f" without one, "s" with a soft cap."""
    kinds = {"w": {"window": 512}, "f": {}, "s": {"soft_cap": 50.0}}
    return [AttentionShape(4, 1, 64, 0.125, **kinds[kind]) for kind in windows]


GEMMA_3_1B = ("wwwww" + "f") * 4 + "ww"


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ("f" * 32, [32]),
        ("w" * 32, [32]),
        ("wf" * 12, [12, 12]),
        ("wwwf" * 12, [12, 12, 12, 12]),
        (GEMMA_3_1B, [3, 4, 4, 3, 4, 4, 4]),
        ("f" + "w" * 5, [1, 1, 1, 1, 1, 1]),
        ("f" * 30 + "w", [6, 6, 6, 6, 6, 1]),
        ("fws", [1, 1, 1]),
    ],
)
def test_groups_waste_little_memory_and_are_few(layers: str, sizes: list[int]) -> None:
    groups = group_layers(shapes(layers), range(len(layers)))
    assert [len(group.layers) for group in groups] == sizes
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    assert all(shapes(layers)[layer] == group.shape for group in groups for layer in group.layers)
    assert len(groups) <= MAX_GROUPS


def test_all_stages_have_the_same_groups_each_with_its_own_layers() -> None:
    stages = [range(7), range(7, 11), range(11, 26)]
    divided = [group_layers(shapes(GEMMA_3_1B), stage) for stage in stages]
    kinds = [[group.shape for group in groups] for groups in divided]
    assert kinds[0] == kinds[1] == kinds[2]
    for stage, groups in zip(stages, divided, strict=True):
        assert sorted(layer for group in groups for layer in group.layers) == list(stage)
    assert not divided[1][-1].layers, "the second stage has windows only"
    assert [max_group_layers(groups) for groups in divided] == [1, 1, 3]


def test_keys_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="different sizes of keys"):
        group_layers([AttentionShape(4, 1, 64, 0.125), AttentionShape(4, 2, 64, 0.125)], range(2))


def test_layers_without_attention_are_in_no_group() -> None:
    full, window = shapes("fw")
    groups = group_layers([None, full, None, window, full], range(5))
    assert [(group.shape, group.layers) for group in groups] == [(full, (1,)), (full, (4,)), (window, (3,))]
    assert group_layers([None, None], range(2)) == ()
    assert max_group_layers(()) == 0 and key_sizes(()) == (0, 0, None) and key_sizes(groups) == (1, 64, None)


def test_a_slot_has_the_states_of_all_layers() -> None:
    group = StateGroup({1: StateShape(((3, 10), (2, 4, 5))), 4: StateShape(((2, 7),))})
    assert group.layers == (1, 4) and group.num_bytes == 4 * (30 + 40 + 14)
    (conv, scan), (short,) = (StateStorage(group, 6).layer(layer) for layer in group.layers)
    assert conv.shape == (6, 3, 10) and scan.shape == (6, 2, 4, 5) and short.shape == (6, 2, 7)
    assert {tensor.dtype for tensor in (conv, scan, short)} == {torch.float32}
