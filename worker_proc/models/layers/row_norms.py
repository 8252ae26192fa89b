"""Norms of queries and keys whose weights differ between heads.

Each rank has the weights of its heads. A norm over all heads gathers the rows of the ranks, so a rank normalizes the
same rows as a single rank would, and keeps its part. The bits are equal, at the cost of one more exchange of queries
and of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.layer_norm import layer_norm
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.rms_norm import rms_norm
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.layers.devices import require_cpu
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.group import TensorParallelGroup


@dataclass(frozen=True, slots=True)
class RowNorms:
    """Norms of queries and keys: from TP to TP, with all heads of this rank side by side."""

    q: Callable[[Tensor], Tensor]
    k: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Heads:
    """The weights of all heads of the model; some of the heads belong to this rank."""

    weight_W: Tensor
    first: int
    """Index of the first weight of this rank's heads."""
    width: int
    """Width of this rank's heads."""
    head_dim: int
    eps: float
    group: TensorParallelGroup | None

    def norm_all_heads(self, x_TP: Tensor) -> Tensor:
        """Return the root-mean-square norm over all heads of a row."""
        if self.group is None:
            return rms_norm(x_TP, self.weight_W, self.eps)
        all_width = len(self.weight_W)
        x_TW = self.group.all_gather(x_TP, self.first, all_width)
        sizes = [self.first, self.width, all_width - self.first - self.width]
        parts: list[Tensor] = rms_norm(x_TW, self.weight_W, self.eps).split(sizes, dim=1)
        return parts[1]

    def norm_each_head(self, x_TP: Tensor) -> Tensor:
        """Return the layer norm of each head."""
        weight_NH = self.weight_W[self.first : self.first + self.width].unflatten(0, (-1, self.head_dim))
        x_TNH = x_TP.unflatten(1, (-1, self.head_dim))
        return layer_norm(x_TNH, weight_NH, torch.zeros_like(weight_NH), self.eps).flatten(1)


def norms_of_rows(parameters: Parameters, name: str, shape: AttentionShape, eps: float) -> RowNorms:
    """Make root-mean-square norms over all heads: `q_norm` and `k_norm` of the block `name`.

    Raises:
        ConfigError: there are more ranks than key heads.
    """
    sharding = parameters.sharding
    if sharding.size > 1 and sharding.size > sharding.num_kv_heads:
        raise ConfigError(
            f"--tensor-parallel-size {sharding.size}: the model normalizes all {sharding.num_kv_heads} heads of its "
            "keys together, and ranks that share a head cannot put them together",
            hint=f"use --tensor-parallel-size {sharding.num_kv_heads} or fewer",
        )
    queries, keys = _heads(parameters, name, shape, eps)
    return RowNorms(queries.norm_all_heads, keys.norm_all_heads)


def layer_norms_of_heads(parameters: Parameters, name: str, shape: AttentionShape, eps: float) -> RowNorms:
    """Make layer norms of each single head, with a weight per head and no bias.

    Raises:
        ConfigError: the model is on a GPU.
    """
    require_cpu(parameters, "layer norms of heads")
    queries, keys = _heads(parameters, name, shape, eps)
    return RowNorms(queries.norm_each_head, keys.norm_each_head)


def _heads(parameters: Parameters, name: str, shape: AttentionShape, eps: float) -> tuple[_Heads, _Heads]:
    sharding = parameters.sharding

    def heads(part: str, num_all: int, num_own: int) -> _Heads:
        weight_W = parameters.new(f"{name}.{part}_norm.weight", num_all * shape.head_dim)
        first = num_all * sharding.rank // sharding.size
        widths = first * shape.head_dim, num_own * shape.head_dim
        return _Heads(weight_W, *widths, shape.head_dim, eps, parameters.group)

    num_keys = shape.num_kv_heads if sharding.size == 1 else sharding.num_kv_heads
    return heads("q", shape.num_heads * sharding.size, shape.num_heads), heads("k", num_keys, shape.num_kv_heads)
