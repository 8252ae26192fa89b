"""Where the kernels of `sample` write the log-probabilities of rows, and the modes of reporting. Computes nothing."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

MAX_TOP = 32
"""Most likely tokens that are found in a step's own launches; for more, `logprobs_of_rows` is called on its logits."""

RAW, PROCESSED, IS_LOGIT = 1, 2, 4
"""Bits of a mode: the model's logits; the logits that the token is drawn from; these logits themselves. 0: nothing."""


class LogprobsMemory(NamedTuple):
    """One entry for each row. An argument of kernels, which see pointers, so names are without dimensions."""

    chosen: Tensor
    """float32, of the drawn token."""
    ranks: Tensor
    """int32, from 1."""
    top_ids: Tensor
    """(R, MAX_TOP), int64; the first entries are the most likely tokens."""
    top: Tensor
    """(R, MAX_TOP), float32."""
    normalizers: Tensor
    """float64, the log-sum-exp of a row."""

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> Self:
        """Return memory full of zeros."""

        def new(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(num_rows, *width, dtype=dtype, device=device)

        return cls(
            chosen=new(torch.float32),
            ranks=new(torch.int32),
            top_ids=new(torch.int64, MAX_TOP),
            top=new(torch.float32, MAX_TOP),
            normalizers=new(torch.float64),
        )

    def first(self, num_rows: int) -> Self:
        """Return a view of the first rows."""
        return type(self)(*(column[:num_rows] for column in self))
