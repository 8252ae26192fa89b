"""Where the kernels of `sample` write the log-probabilities of rows, and the reporting modes. Computes nothing."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

MAX_TOP = 32
"""Maximum number of most likely tokens found by a step's own launches; for more, call `logprobs_of_rows` on its
logits."""

RAW, PROCESSED, IS_LOGIT = 1, 2, 4
"""Bits of a mode. RAW: report the model's logits; PROCESSED: those the token is drawn from; IS_LOGIT: as logits. 0:
nothing."""


class LogprobsMemory(NamedTuple):
    """One entry per row. An argument of kernels, which see pointers, so names have no dimensions."""

    chosen: Tensor
    """float32, log-probability of the drawn token."""
    ranks: Tensor
    """int32, rank of the drawn token, from 1."""
    top_ids: Tensor
    """(R, MAX_TOP), int64, the most likely tokens; only the first entries are used."""
    top: Tensor
    """(R, MAX_TOP), float32, log-probabilities of `top_ids`."""
    normalizers: Tensor
    """float64, the log-sum-exp of a row."""

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> Self:
        """Return zeroed memory."""

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
