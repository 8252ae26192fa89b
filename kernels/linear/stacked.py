"""Weights that are stacked and packed together, without a copy of all of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StackedRows:
    """A matrix OI that consists of matrices with the same inputs. Only the requested rows are converted."""

    parts: list[Tensor]
    """Matrices of any float dtype, on any device."""
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some rows: a view if they are in one part and need no conversion."""
        pieces = []
        for part in self.parts:
            if start < len(part) and stop > 0:
                pieces.append(part[max(0, start) : stop])
            start, stop = start - len(part), stop - len(part)
        if len(pieces) == 1:
            return pieces[0].to(self.device, self.dtype)
        whole_OI = torch.empty(sum(map(len, pieces)), pieces[0].shape[1], dtype=self.dtype, device=self.device)
        for piece, rows_PI in zip(pieces, whole_OI.split([len(piece) for piece in pieces]), strict=True):
            rows_PI.copy_(piece)
        return whole_OI

    def release(self) -> None:
        """Drop the parts: nothing reads them any more."""
        self.parts.clear()

    def whole(self) -> Tensor:
        """Return all rows as a contiguous tensor."""
        return self.rows(0, self.shape[0]).contiguous()


def some_rows(weight_OI: Tensor | StackedRows, start: int, stop: int) -> Tensor:
    """Return some rows of a weight."""
    return weight_OI[start:stop] if isinstance(weight_OI, Tensor) else weight_OI.rows(start, stop)
