"""Attention of a ragged batch over a paged cache: planned once per step, run once per layer.

Does not write the cache: the step's keys and values are stored before attention runs.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.paged_attention import cpu
from octavo.kernels.paged_attention.shape import AttentionShape

__all__ = ["AttentionShape", "PagedAttention", "plan"]


class PagedAttention(Protocol):
    """The attention of a planned step."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_PSKH: Tensor,
        v_cache_PSKH: Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attend over one layer's cache; return out_TNV in the dtype of `q`. See `AttentionShape.value_dim`.

        `sinks_N` has a score for each query head that takes part in the softmax with a value of 0 (attention sinks).

        The caches hold that dtype, or on a GPU float8_e4m3fn or int8 (`int8_cache`). Stored keys and values are
        multiplied by `k_scale` and `v_scale`.

        Raises:
            ShapeError: the device's implementation does not support the dtypes or scales.
        """


_IMPLEMENTATIONS = {"cpu": cpu.plan, "cuda": lazy("octavo.kernels.paged_attention.gpu", cpu.plan)}


def plan(
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_table_RP: Tensor,
    block_size: int,
    shape: AttentionShape,
    is_span_R: Sequence[bool] | None = None,
) -> PagedAttention:
    """Plan the attention of one step of R requests.

    Row t of request r is at position `context_lens[r] - query_starts[r + 1] + t`. It attends to the positions up to its
    own (without `shape.is_causal`: to all), and finds position p in block `block_table[r, p // block_size]`. Scores and
    sums are float32. Tiles of keys are anchored at position 0 and combined in order, so the result for a position does
    not depend on how many tokens the step computes.

    Args:
        query_starts: R + 1 offsets into the T rows of the step.
        context_lens: R; number of keys of each request, including those of this step.
        block_table_RP: int32, padded with any valid block number.
        block_size: token slots of a block.
        shape: heads, scale and window.
        is_span_R: whether the rows of a request attend to all of its keys, also later ones (the rows of an image are a
            request of their own here); no request if `None`. Only on CPUs.

    Raises:
        ShapeError: the lengths are inconsistent, or the query heads are not a multiple of the key heads.
        UnsupportedDevice: no implementation for the device of the block table, or it does not support the shape.
    """
    require(
        len(query_starts) == len(context_lens) + 1 == block_table_RP.shape[0] + 1,
        f"paged_attention: {len(query_starts)} offsets, {len(context_lens)} lengths, {block_table_RP.shape[0]} tables",
    )
    require(
        shape.num_heads % shape.num_kv_heads == 0,
        f"paged_attention: {shape.num_heads} query heads for {shape.num_kv_heads} key heads",
    )
    for start, end, context_len in zip(query_starts, query_starts[1:], context_lens, strict=False):
        require(
            end - start > 0 and (end - start <= context_len or not shape.is_causal),
            f"paged_attention: {end - start} rows of a request with {context_len} keys",
        )
        require(
            0 < context_len <= block_table_RP.shape[1] * block_size,
            f"paged_attention: {end - start} rows and {context_len} keys in {block_table_RP.shape[1]} blocks",
        )
    planner = choose("paged_attention", _IMPLEMENTATIONS, block_table_RP.device)
    return planner(query_starts, context_lens, block_table_RP, block_size, shape, is_span_R)
