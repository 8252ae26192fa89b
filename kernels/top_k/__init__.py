"""The k largest values of a row, with a fixed order among equals."""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.top_k import cpu

_IMPLEMENTATIONS = {"cpu": cpu.top_k}
"""Implementations by device type. GPUs select from many rows at once: see `gpu.top_k_of_rows`."""


def top_k(values_V: Tensor, k: int) -> Tensor:
    """Return the int64 indices of the `k` largest values: by descending value, equal ones by ascending index.

    All of them when `k` is larger than the row. NaN is not allowed.
    """
    return choose("top_k", _IMPLEMENTATIONS, values_V.device)(values_V, k)
