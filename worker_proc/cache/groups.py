"""KV cache groups: layers that share block tables, and what their attention looks like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.kernels.paged_attention import AttentionShape


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose keys and values lie in blocks with the same ids.

    One block table and one slot mapping serve all of them, and their attention is planned once for each step.
    """

    shape: AttentionShape
    layers: tuple[int, ...]
    """Indices of the layers in the model."""


def group_layers(shapes: Mapping[int, AttentionShape]) -> tuple[CacheGroup, ...]:
    """Return a group for each different attention, in the order of their first layers.

    Args:
        shapes: of the attention of each layer, by its index.
    """
    members: dict[AttentionShape, list[int]] = {}
    for layer, shape in shapes.items():
        members.setdefault(shape, []).append(layer)
    return tuple(CacheGroup(shape, tuple(layers)) for shape, layers in members.items())


def places_of_layers(groups: Sequence[CacheGroup]) -> dict[int, tuple[int, int]]:
    """Return for each layer the index of its group, and its index within that group."""
    return {layer: (index, place) for index, group in enumerate(groups) for place, layer in enumerate(group.layers)}
