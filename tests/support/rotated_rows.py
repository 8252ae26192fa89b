"""Arguments of `rope_store_kv` for its tests: rows cut from one product, as a model's are, and full caches."""

from dataclasses import dataclass

import torch
from kernel_checks import random
from torch import Tensor

from octavo.kernels.rope_store_kv import cases
from octavo.kernels.rope_store_kv.rotation import QKNorm, Rotation

NUM_SLOTS = 80


@dataclass
class StepRows:
    """The rows of one step and the caches they go to."""

    qkv: tuple[Tensor, Tensor, Tensor]
    rotation: Rotation
    cache: Tensor
    """Keys followed by values."""
    slots: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Rotation, Tensor, Tensor, Tensor]:
        """Return the arguments in the order of the operation."""
        return (*self.qkv, self.rotation, self.cache[0], self.cache[1], self.slots)

    def part(self, start: int, end: int) -> "StepRows":
        """Return some of the rows as a separate step with a separate cache."""
        q, k, v = (x[start:end].clone() for x in self.qkv)
        rotation = Rotation(self.rotation.cos_TC[start:end], self.rotation.sin_TC[start:end], self.rotation.norm)
        return StepRows((q, k, v), rotation, self.cache.clone(), self.slots[start:end])

    def to(self, device: torch.device) -> "StepRows":
        """Return copies on `device`; the queries, keys and values still cut from one tensor."""
        q, k, v = self.qkv
        wide = torch.cat(self.qkv, dim=1).to(device)
        norm = self.rotation.norm
        if norm is not None:
            norm = QKNorm(norm.q_weight_H.to(device), norm.k_weight_H.to(device), norm.eps)
        rotation = Rotation(self.rotation.cos_TC.to(device), self.rotation.sin_TC.to(device), norm)
        parts = wide.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
        return StepRows(
            (parts[0], parts[1], parts[2]), rotation, self.cache.clone().to(device), self.slots.clone().to(device)
        )


def make_rows(
    num_rows: int, heads: tuple[int, int, int, int], dtype: torch.dtype, *, block_size: int, has_norm: bool, seed: int
) -> StepRows:
    """Return random rows for distinct slots of a cache of 80."""
    num_heads, num_kv_heads, head_dim, num_pairs = heads
    wide = random(num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=seed, scale=3.0)
    q, k, v = wide.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = random(num_rows, num_pairs, seed=seed + 1) * 100
    weights = random(2, head_dim, dtype=dtype, seed=seed + 2)
    norm = QKNorm(weights[0], weights[1], cases.EPS) if has_norm else None
    cache = random(2, NUM_SLOTS // block_size, block_size, num_kv_heads, head_dim, dtype=dtype, seed=seed + 3)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed))[:num_rows]
    return StepRows((q, k, v), Rotation(angles.cos(), angles.sin(), norm), cache, slots)
