"""Rules that convert the tensors of a checkpoint to those of our layers: other names, fused and interleaved rows.

Every model here names its layers `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`, `fc1`
and `fc2`, so that stacking and division between ranks work in one way. Rules see undivided tensors, before that.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.parallel.sharding import Shard

Values = Tensor | QuantizedMatrix
Rule = Callable[[str, Values], Iterator[tuple[str, Values]]]
"""Yields the tensors that replace a tensor of the checkpoint; it may yield the tensor itself."""


def apply_rules(rules: Sequence[Rule], name: str, values: Values) -> Iterable[tuple[str, Values]]:
    """Return the tensors that replace a tensor after all rules, applied in order."""
    tensors: Iterable[tuple[str, Values]] = [(name, values)]
    for rule in rules:
        tensors = [result for tensor in tensors for result in rule(*tensor)]
    return tensors


def renamed(replacements: Mapping[str, str]) -> Rule:
    """Replace patterns in names."""
    patterns = [(re.compile(pattern), name) for pattern, name in replacements.items()]

    def rule(name: str, values: Values) -> Iterator[tuple[str, Values]]:
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        yield name, values

    return rule


def split_rows(layer: str, parts: Mapping[str, Sequence[range]]) -> Rule:
    """Split the weight and the bias of the layers called `layer` into layers with other names.

    Args:
        layer: last part of the name.
        parts: the new names, and the rows of each.
    """

    def rule(name: str, values: Values) -> Iterator[tuple[str, Values]]:
        block, _, kind = name.rpartition(".")
        if block.rpartition(".")[2] != layer:
            yield name, values
            return
        num_rows = sum(len(rows) for part in parts.values() for rows in part)
        if values.shape[0] != num_rows:
            raise ConfigError(
                f"{name!r} has {values.shape[0]} rows in the checkpoint; its config.json asks for {num_rows}"
            )
        for part, rows in parts.items():
            yield f"{block.removesuffix(layer)}{part}.{kind}", take_rows(values, rows)

    return rule


def reordered_rows(pattern: str, order: Sequence[range]) -> Rule:
    """Reorder the rows of the tensors whose names match."""

    def rule(name: str, values: Values) -> Iterator[tuple[str, Values]]:
        yield name, take_rows(values, order) if re.search(pattern, name) else values

    return rule


def flattened(pattern: str) -> Rule:
    """Flatten the tensors whose names match to one dimension."""

    def rule(name: str, values: Values) -> Iterator[tuple[str, Values]]:
        yield name, values.flatten() if isinstance(values, Tensor) and re.search(pattern, name) else values

    return rule


def one_added(pattern: str) -> Rule:
    """Add one to the tensors whose names match, in float32: norm scales that are stored as the difference from 1."""

    def rule(name: str, values: Values) -> Iterator[tuple[str, Values]]:
        is_scale = isinstance(values, Tensor) and re.search(pattern, name)
        yield name, values.float() + 1.0 if is_scale and isinstance(values, Tensor) else values

    return rule


def take_rows(values: Values, rows: Sequence[range]) -> Values:
    """Return some rows of a tensor in this order; a view if they are adjacent."""
    if isinstance(values, Tensor) and any(part.step != 1 for part in rows):
        return values[torch.tensor([row for part in rows for row in part])]
    shard = Shard(0, values.shape[0], tuple(rows))
    return shard.of(values) if isinstance(values, Tensor) else values.part(shard)


def stacked(parts: Mapping[str, int]) -> dict[str, list[range]]:
    """Return the rows of consecutive parts, for `split_rows`."""
    rows, start = {}, 0
    for name, length in parts.items():
        rows[name] = [range(start, start + length)]
        start += length
    return rows


def stacked_qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, list[range]]:
    """Return the rows of all queries, then all keys, then all values."""
    widths = num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim
    return stacked(dict(zip(("q_proj", "k_proj", "v_proj"), widths, strict=True)))


def grouped_qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, list[range]]:
    """Return the rows of layouts that store, for each key head, its queries, its key and its value."""
    group = num_heads // num_kv_heads
    starts = [head * (group + 2) * head_dim for head in range(num_kv_heads)]
    return {
        "q_proj": [range(start, start + group * head_dim) for start in starts],
        "k_proj": [range(start + group * head_dim, start + (group + 1) * head_dim) for start in starts],
        "v_proj": [range(start + (group + 1) * head_dim, start + (group + 2) * head_dim) for start in starts],
    }


def halves_of_pairs(num_heads: int, head_dim: int, num_rotated: int) -> list[range]:
    """Return the row order that turns rotated pairs of neighbours into pairs half a head apart.

    Products of queries and keys do not depend on the order of their dimensions.

    Args:
        num_heads: number of heads of the projection.
        head_dim: rows of each head.
        num_rotated: number of leading dimensions of each head that are rotated.
    """
    order = []
    for start in range(0, num_heads * head_dim, head_dim):
        end = start + num_rotated
        order += [range(start, end, 2), range(start + 1, end, 2), range(end, start + head_dim)]
    return [rows for rows in order if rows]
