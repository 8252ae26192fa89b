"""Cache groups: layers of equal attention that share a block table, and the group of layers with a recurrent state.

The groups of a model share one memory: block i of every group has the same address, and the core assigns it to one of
them at a time. A block therefore takes as much memory in every group as in the largest one.

All layers with a state form one more group, after those of attention, with memory of its own: see `states.py`.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError

MAX_GROUPS = 8
"""A step plans attention for each group, and the core keeps a block list per request and group."""

_GROUP_COST = 0.02
"""Time cost of another group, as the fraction of memory that it must save to be worthwhile."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose keys and values are in blocks with the same ids.

    They share one block table and one slot mapping, and their attention is planned once per step.
    """

    shape: AttentionShape
    layers: tuple[int, ...]
    """Indices of the layers in the model; may be empty for a pipeline stage."""

    @property
    def num_places(self) -> int:
        """Number of layers that a block has room for.

        The keys of bidirectional attention are never read after their layer, because a request is computed in one step.
        All such layers share one place.
        """
        return len(self.layers) if self.shape.is_causal else min(len(self.layers), 1)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shapes of the float32 tensors that hold a layer's recurrent state of one request."""

    parts: tuple[tuple[int, ...], ...]
    """Shape of each tensor."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return sum(torch.float32.itemsize * math.prod(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The layers with a state. A slot holds the state of one request in all of them."""

    shapes: Mapping[int, StateShape]
    """State shape by layer index; may be empty for a pipeline stage."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers."""
        return tuple(self.shapes)

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(shape.num_bytes for shape in self.shapes.values())


def group_layers(shapes: Sequence[AttentionShape | None], own_layers: Container[int]) -> tuple[CacheGroup, ...]:
    """Divide the layers of a model into groups of equal attention and about equal size.

    All pipeline stages have the same groups, each with its own layers.

    Args:
        shapes: shape of the attention of each layer of the model; `None` for a layer without attention.
        own_layers: layers of this pipeline stage.

    Raises:
        ConfigError: sizes of keys and values differ between layers.
    """
    kinds: dict[AttentionShape, list[int]] = {}
    for layer, shape in enumerate(shapes):
        if shape is not None:
            kinds.setdefault(shape, []).append(layer)
    if not kinds:
        return ()
    sizes = {(shape.num_kv_heads, shape.head_dim, shape.key_value_dim or "stored") for shape in kinds}
    if len(sizes) > 1:
        listed = sorted(sizes, key=str)
        raise ConfigError(f"layers with different sizes of keys are not supported: (heads, keys, values) {listed}")
    counts = _groups_of_kinds([len(layers) for layers in kinds.values()], [shape.window for shape in kinds])
    if not all(shape.is_causal for shape in kinds):
        counts = [1] * len(kinds)  # their layers share one place, so the number of layers does not matter
    groups = []
    for (shape, layers), num_groups in zip(kinds.items(), counts, strict=True):
        own = [layer for layer in layers if layer in own_layers]
        bounds = [index * len(own) // num_groups for index in range(num_groups + 1)]
        groups += [CacheGroup(shape, tuple(own[start:end])) for start, end in pairwise(bounds)]
    return tuple(groups)


def _groups_of_kinds(num_layers: Sequence[int], windows: Sequence[int | None]) -> list[int]:
    """Return the number of groups for the layers of each kind.

    Equal groups waste no memory, but small groups are many. The chosen size minimizes the memory of a short request,
    which has blocks in all groups, and of a long request, which has most of its blocks in groups without a window.
    """

    def cost(size: int) -> float:
        counts = [-(-layers // size) for layers in num_layers]
        num_long = sum(count for count, window in zip(counts, windows, strict=True) if window is None)
        excess = max(0, sum(counts) - max(MAX_GROUPS, len(num_layers)))
        return (sum(counts) + num_long) * size * (1 + _GROUP_COST * sum(counts)) + excess * sum(num_layers)

    best = min(range(1, max(num_layers) + 1), key=cost)
    return [-(-layers // best) for layers in num_layers]


def places_of_layers(groups: Sequence[CacheGroup]) -> dict[int, tuple[int, int]]:
    """Return for each layer the index of its group, and its index within a block."""
    return {
        layer: (index, place if group.shape.is_causal else 0)
        for index, group in enumerate(groups)
        for place, layer in enumerate(group.layers)
    }


def key_sizes(groups: Sequence[CacheGroup]) -> tuple[int, int, int | None]:
    """Return `num_kv_heads`, `head_dim` and `key_value_dim`, which all groups share; zeros if there are no groups."""
    if not groups:
        return 0, 0, None
    shape = groups[0].shape
    return shape.num_kv_heads, shape.head_dim, shape.key_value_dim


def max_group_layers(groups: Sequence[CacheGroup]) -> int:
    """Return the number of layers that a block has room for."""
    return max((group.num_places for group in groups), default=0)
