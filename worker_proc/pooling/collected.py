"""The hidden states of one request's tokens that have been computed so far, chunk by chunk."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Collected:
    """Rows in token order: summed up, or kept."""

    num_rows: int = 0
    sum_D: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    chunks: list[Floats] = field(default_factory=list)

    def add(self, rows_ND: Floats, *, keeps_all: bool) -> None:
        """Add the next rows, at least one, which may be overwritten afterwards."""
        self.num_rows += len(rows_ND)
        if keeps_all:
            self.chunks.append(rows_ND.copy())
            return
        if len(self.sum_D):
            rows_ND = np.concatenate([self.sum_D[None], rows_ND])
        # Along the first axis numpy adds one row after the other, so that the sum does not depend on the chunks.
        self.sum_D = np.add.reduce(rows_ND, axis=0)

    def mean(self) -> Floats:
        """Return the mean of all rows."""
        return self.sum_D / np.float32(self.num_rows)
