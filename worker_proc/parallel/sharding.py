"""The part of each weight that a tensor-parallel rank holds, by the role of the weight.

As in Megatron-LM (Shoeybi et al. 2019), weights before attention and before the activation are divided by outputs, and
weights after them by inputs. Each of the two blocks of a layer then needs one sum over the ranks. Models are built with
the sizes of their rank, from `facts_of_rank`, and do not know about ranks.
"""

import re
from dataclasses import dataclass
from enum import Enum

import msgspec
import torch
from torch import Tensor

from octavo.kernels.linear.native import NUM_SEGMENTS
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.config.division import check_division, config_of_rank, division_problem, state_heads
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError


class Role(Enum):
    """How a weight is divided."""

    REPLICATED = "replicated"
    """Not divided."""
    COLUMN = "column"
    """Divided by outputs, such as the heads of queries and the columns of the activation."""
    KEY_VALUE = "key_value"
    """Divided by heads; ranks share a head if there are more ranks than heads."""
    STATE_GROUP = "state_group"
    """Divided by groups of heads with a recurrent state; ranks share a group if there are more ranks than groups."""
    THIRDS = "thirds"
    """Three equal parts in one weight, such as queries, keys and values; each part is divided by outputs."""
    ROW = "row"
    """Divided by inputs; the outputs of all ranks are summed."""
    VOCABULARY = "vocabulary"
    """Divided by tokens, as evenly as possible."""


_ROLES = [
    (r"\.(q_proj|q_b_proj|gate_proj|up_proj|fc1|c_fc|w1|w3)$", Role.COLUMN),
    (r"\.(k_proj|v_proj)$", Role.KEY_VALUE),
    (r"\.c_attn$|\.conv\.in_proj$", Role.THIRDS),
    (r"\.(o_proj|out_proj|down_proj|fc2|c_proj|w2)$", Role.ROW),
    (r"\.(self_attn|mixer|mamba|linear_attn)$", Role.COLUMN),  # numbers of each head, such as attention sinks
    (r"\.(mixer|mamba)\.norm$|\.conv\.conv$", Role.COLUMN),
    (r"\.(x_proj|dt_proj|conv1d_[xv]|in_proj_[vzba])$", Role.COLUMN),
    (r"\.(state_[bc]_proj|conv1d_[bcqk]|in_proj_[qk])$", Role.STATE_GROUP),
    (r"^(embed_tokens|wte|lm_head)$", Role.VOCABULARY),
]
"""Names of layers in checkpoints, without the prefix of the model. All others are replicated."""


def role_of(layer: str) -> Role:
    """Return the role of a layer's weight.

    Args:
        layer: name of the layer in the checkpoint, without the prefix of the model.
    """
    return next((role for pattern, role in _ROLES if re.search(pattern, layer)), Role.REPLICATED)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a checkpoint tensor that a rank holds."""

    dim: int
    size: int
    """Size of the undivided tensor in this dimension."""
    ranges: tuple[range, ...]
    """Indices that the rank holds in this dimension."""

    @property
    def length(self) -> int:
        """Number of indices that this rank holds."""
        return sum(map(len, self.ranges))

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, given that of the undivided tensor."""
        return tuple(self.length if dim == self.dim else length for dim, length in enumerate(shape))

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the undivided tensor, given that of the part."""
        return tuple(self.size if dim == self.dim else length for dim, length in enumerate(shape))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part; a view if it is one range."""
        parts = [tensor.narrow(self.dim, part.start, len(part)) for part in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True, slots=True)
class Sharding:
    """A rank's position among those that divide a model, and the numbers that determine its parts."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 1
    """Key heads of the undivided model."""
    num_state_groups: int = 1
    """Groups of heads of the undivided model that share inputs of their recurrence."""
    num_segments: int = 1
    """Number of segments in which a product sums divisible inputs: the most ranks, up to 8, with the same sums."""
    divides_experts: bool = False
    """Whether each rank has some complete experts of a mixture, instead of a part of each."""
    engine: int = 0
    """Index of this rank among those that divide the experts."""
    num_engines: int = 1
    """Number of engines, each with equally many ranks; they divide only experts."""

    @classmethod
    def of(cls, config: ResolvedConfig, rank: int) -> "Sharding":
        """Return the sharding of a rank among those that share the layers of a model."""
        facts, size = config.model, config.tensor_parallel_size
        num_segments = max(count for count in NUM_SEGMENTS if not division_problem(facts, count))
        engine, num_engines = (config.engine_index, config.data_parallel_size) if config.is_lock_step else (0, 1)
        divides_experts = config.enable_expert_parallel
        num_state_groups = next(iter(state_heads(facts)[1].values()), 1)
        return cls(rank, size, facts.num_kv_heads, num_state_groups, num_segments, divides_experts, engine, num_engines)

    def own_experts(self, num_experts: int) -> range:
        """Return the experts whose weights this rank has.

        Raises:
            ConfigError: there are more ranks than experts.
        """
        if not self.divides_experts:
            return range(num_experts)
        num_ranks, rank = self.num_engines * self.size, self.engine * self.size + self.rank
        if num_ranks > num_experts:
            raise ConfigError(
                f"--enable-expert-parallel: {num_experts} experts for {num_ranks} ranks",
                hint=f"use {num_experts} workers or fewer (--tensor-parallel-size times --data-parallel-size), or "
                "leave --enable-expert-parallel out",
            )
        return range(num_experts * rank // num_ranks, num_experts * (rank + 1) // num_ranks)

    def whole_heads(self, facts: ModelFacts) -> tuple[int, int]:
        """Return the query heads and the key heads of the undivided model, given the facts of a rank."""
        return (
            (facts.num_heads, facts.num_kv_heads)
            if self.size == 1
            else (facts.num_heads * self.size, self.num_kv_heads)
        )

    def shard(self, role: Role, shape: tuple[int, ...]) -> Shard | None:
        """Return the part of a weight or a bias that this rank holds; `None` means all of it.

        Args:
            role: role of its layer.
            shape: shape with outputs first, in the sizes of this rank, except that the vocabulary is undivided.
        """
        if self.size == 1 or role is Role.REPLICATED:
            return None
        length = shape[0]
        match role:
            case Role.COLUMN:
                return self._divided(0, [length])
            case Role.THIRDS:
                return self._divided(0, [length // 3] * 3)
            case Role.ROW:
                return self._divided(1, [shape[1]]) if len(shape) == 2 else None
            case Role.VOCABULARY:
                return Shard(
                    0, length, (range(length * self.rank // self.size, length * (self.rank + 1) // self.size),)
                )
            case Role.KEY_VALUE:
                return self._shared(self.num_kv_heads, length)
            case Role.STATE_GROUP:
                return self._shared(self.num_state_groups, length)

    def _shared(self, num_heads: int, length: int) -> Shard:
        """Return this rank's part of heads. Ranks share heads if there are more ranks; `length` is that of the part."""
        width = length // max(1, num_heads // self.size)
        first = num_heads * self.rank // self.size * width
        return Shard(0, num_heads * width, (range(first, first + length),))

    def _divided(self, dim: int, lengths: list[int]) -> Shard:
        """Return this rank's part of several adjacent tensors, each divided into equal parts."""
        ranges, start = [], 0
        for length in lengths:
            first = start + self.rank * length
            ranges.append(range(first, first + length))
            start += self.size * length
        return Shard(dim, start, tuple(ranges))


WHOLE = Sharding()
"""Sharding of the only rank of an undivided model."""


def facts_of_rank(facts: ModelFacts, size: int) -> ModelFacts:
    """Return the facts with the sizes that each of `size` ranks computes with.

    Raises:
        ConfigError: heads or columns cannot be divided evenly.
    """
    if size == 1:
        return facts
    check_division(facts, size)
    return msgspec.structs.replace(
        facts,
        num_heads=facts.num_heads // size,
        num_kv_heads=max(1, facts.num_kv_heads // size),
        hf_config=config_of_rank(facts, size),
    )
