"""KV cache groups: layers that share block tables, and what their attention looks like."""

from collections.abc import Sequence
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


def places_of_layers(groups: Sequence[CacheGroup]) -> dict[int, tuple[int, int]]:
    """Return for each layer the index of its group, and its index within that group."""
    return {layer: (index, place) for index, group in enumerate(groups) for place, layer in enumerate(group.layers)}
