"""The place of `store_kv` in a program."""

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Node, value_of
from octavo.kernels.paged_attention.layout import CacheLayout, LayoutArguments
from octavo.kernels.store_kv.native import StoreKvArguments


def record(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, layout: CacheLayout) -> None:
    """Record the storing of a step's keys and values in one layer's cache."""
    k, v = value_of(k_TKH), value_of(v_TKH)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        keys, values = inputs
        return StoreKvArguments(keys, values, k_cache.data_ptr(), v_cache.data_ptr(), LayoutArguments.of(layout))

    k.recorder.do(Node("store_kv", [k, v], [], bind, is_row_wise=True, keeps=[k_cache, v_cache]))
