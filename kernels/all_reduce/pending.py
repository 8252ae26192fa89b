"""A sum over ranks that is computed lazily, so that the norm that follows can be fused with it."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class FusedSum(Protocol):
    """Sums the parts of all ranks: see `octavo.kernels.all_reduce.gpu.OneShotAllReduce`."""

    dtype: torch.dtype
    """Dtype of the sums."""

    def all_reduce(self, partial_TD: Tensor, bias_D: Tensor | None) -> Tensor:
        """Return the sum, plus the bias."""

    def all_reduce_add_rms_norm(
        self, partial_TD: Tensor, bias_D: Tensor | None, x_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x` plus the sum, and its norm."""


class PendingSum(Tensor):
    """The sum of all ranks' `partial`, plus the bias.

    `add_rms_norm` computes it together with the norm. Any other use of the tensor computes it first: every access by
    torch or a kernel, except to its shape, dtype and device, goes through `__torch_function__`.
    """

    _ranks: FusedSum
    _partial_TD: Tensor
    _bias_D: Tensor | None
    _is_computed: bool
    """Whether the sum is in the tensor's own memory."""

    @staticmethod
    def of(ranks: FusedSum, partial_TD: Tensor, bias_D: Tensor | None) -> "PendingSum":
        """Return the sum. `partial` must not change while it is used."""
        pending = torch.empty_like(partial_TD, dtype=ranks.dtype).as_subclass(PendingSum)
        pending._ranks, pending._partial_TD, pending._bias_D = ranks, partial_TD, bias_D
        pending._is_computed = False
        return pending

    def add_rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return `x` plus the sum, and its norm."""
        return self._ranks.all_reduce_add_rms_norm(self._partial_TD, self._bias_D, x_TD, weight_D, eps)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _METADATA:
                _compute([*args, *(kwargs or {}).values()])
            return func(*args, **(kwargs or {}))


_METADATA = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__}  # type: ignore[attr-defined]


def _compute(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            _compute(argument)
        elif isinstance(argument, PendingSum) and not argument._is_computed:
            argument._is_computed = True
            argument.copy_(argument._ranks.all_reduce(argument._partial_TD, argument._bias_D))
