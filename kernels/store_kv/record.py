"""Records `store_kv` in a program."""

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Node, value_of
from octavo.kernels.paged_attention.layout import CacheLayout, LayoutArguments
from octavo.kernels.store_kv.native import StoreKvArguments


def record(
    k_TKH: Tensor,
    v_TKH: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: CacheLayout,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Record the storing of a step's keys and values in one layer's cache; no values: they are parts of keys.

    `scales` are divisors of keys and values that are stored in 8-bit floats.
    """
    rows = [value_of(tensor) for tensor in (k_TKH, v_TKH) if tensor is not None]

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        values = inputs[1] if len(inputs) > 1 else Matrix()
        addresses = k_cache.data_ptr(), v_cache.data_ptr()
        return StoreKvArguments(inputs[0], values, *addresses, LayoutArguments.of(layout), *scales)

    node = Node("store_kv", rows, [], bind, is_row_wise=True, keep_alive=[k_cache, v_cache])
    node.takes_bf16 = layout.dtype == torch.bfloat16
    rows[0].recorder.append_effect(node)
