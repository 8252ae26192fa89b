"""The key and value tensors of layers. The core decides which request owns a block."""

import torch
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape, int8_cache


def block_bytes(num_layers: int, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers, keys and values."""
    if dtype == torch.int8:
        return 2 * num_layers * int8_cache.block_bytes(block_size, shape.num_kv_heads, shape.head_dim)
    num_tensors = 2 if shape.key_value_dim is None else 1
    return num_tensors * num_layers * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


class KVStorage:
    """One pair of tensors per layer of a group, shared by all groups. Shape: PSKH (blocks, slots, key heads, head
    dimension).

    8-bit integers have scales behind them; see `int8_cache`. If values are the beginnings of keys, they have no memory
    of their own. On a GPU the slots of a head are contiguous, as its kernels require; on a CPU the heads of a slot are.

    Not initialized: a slot is written before it is read. The kernel then allocates a page on the first use of its
    block, in microseconds. Allocating all pages at start-up would take a second per 2 GiB.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        key_value_dim: int | None = None,
    ) -> None:
        device = torch.device(device)
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        if device.type != "cpu":
            shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._stores_values = key_value_dim is None
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._has_scales = dtype == torch.int8
        for _ in range(num_layers):
            if self._has_scales:
                memory = [
                    int8_cache.empty_cache(num_blocks, block_size, num_kv_heads, head_dim, device) for _ in range(2)
                ]
                self._layers.append((memory[0], memory[1]))
                continue
            keys = torch.empty(shape, dtype=dtype, device=device)
            values = torch.empty_like(keys) if key_value_dim is None else keys[..., :key_value_dim]
            self._layers.append((keys, values))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the caches of keys and of values of one layer."""
        k_cache, v_cache = self._layers[index]
        if self._has_scales:
            return int8_cache.levels_of(k_cache, self.block_size), int8_cache.levels_of(v_cache, self.block_size)
        return (
            (k_cache, v_cache) if k_cache.device.type == "cpu" else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        )

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values of each layer, block by block; only keys if values are parts of keys."""
        return [buffer for keys, values in self._layers for buffer in (keys, values)[: 1 + self._stores_values]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(k_PSKH.nbytes + (v_PSKH.nbytes if self._stores_values else 0) for k_PSKH, v_PSKH in self._layers)
