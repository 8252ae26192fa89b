"""Keys and values of items for cross-attention. They are computed once per item, and requests attend to all of them."""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.worker_proc.batch.inputs import GroupInputs, Ints
from octavo.worker_proc.cache.storage import KVStorage


class CrossCache:
    """The paged cache of all layers with cross-attention. Each item occupies consecutive blocks.

    It has the format of the requests' cache, so one kernel reads both.

    Args:
        shape: shape of the bidirectional attention of each layer.
        num_layers: number of layers with cross-attention.
        num_items: most items.
        num_keys: number of keys of an item.
        block_size: tokens of a block.
        dtype: type of keys and values.
        library: native kernels; `None` if torch or a GPU computes.
        device: device of keys and values.
        group: index of the cache group of these layers in a step, after all others.
        aligned_layers: layers whose queries every step keeps, for alignments.

    Raises:
        MemoryError, RuntimeError: not enough memory.
    """

    def __init__(
        self,
        shape: AttentionShape,
        num_layers: int,
        *,
        num_items: int,
        num_keys: int,
        block_size: int,
        dtype: torch.dtype,
        library: NativeLibrary | None,
        device: torch.device,
        group: int,
        aligned_layers: Collection[int] = (),
    ) -> None:
        self.aligned_layers = aligned_layers
        self.shape, self.num_items, self.num_keys = shape, num_items, num_keys
        self.block_size, self.group = block_size, group
        self.blocks_per_item = -(-num_keys // block_size)
        num_blocks = num_items * self.blocks_per_item
        self.layout = CacheLayout.of(shape, dtype, block_size, group)
        """Layout of the native cache of a layer."""
        self._is_native = library is not None
        self.layers: list[tuple[Tensor, Tensor]]
        """Keys and values of each layer."""
        if library is not None:
            self.layers = [self.layout.allocate(num_blocks, layer, num_layers) for layer in range(num_layers)]
        else:
            storage = KVStorage(
                num_layers=num_layers,
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                dtype=dtype,
                device=device,
            )
            self.layers = [storage.layer(layer) for layer in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers with all items."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer)

    def slots_of(self, place: int) -> Ints:
        """Return the cache slots of an item's keys."""
        return place * self.blocks_per_item * self.block_size + np.arange(self.num_keys)

    def keys(self, layer: int, place: int) -> Tensor:
        """Return a copy of the keys of an item in one layer: float32, shape SKH."""
        first = place * self.blocks_per_item * self.block_size
        if self._is_native:
            return self.layout.keys(self.layers[layer][0], first, self.num_keys)
        return self.layers[layer][0].flatten(0, 1)[first : first + self.num_keys].float()

    def inputs(self, places_R: Ints) -> GroupInputs:
        """Return the group inputs of a step whose requests attend to the items at these indices."""
        blocks = places_R[:, None] * self.blocks_per_item + np.arange(self.blocks_per_item)
        context_lens_R = np.full(len(places_R), self.num_keys)
        return GroupInputs(np.zeros(0, dtype=np.int64), blocks.astype(np.int32), context_lens_R)
