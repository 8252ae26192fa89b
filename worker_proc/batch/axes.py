"""Positions on the axes of time, rows and columns (M-RoPE), from the grids of a request's images and videos.

A text token advances all axes by one. Positions within a grid start after the token before the grid and count time,
rows and columns; frames may be several positions apart. The token after a grid follows the largest position on any
axis.
"""

from collections.abc import Sequence

import numpy as np

from octavo.protocol.media import NUM_AXES, GridSpan
from octavo.worker_proc.batch.columns import SlotColumns
from octavo.worker_proc.batch.inputs import Ints


class AxisPositions:
    """The positions of a batch's tokens on several axes.

    Args:
        columns: columns of the batch.
    """

    def __init__(self, columns: SlotColumns) -> None:
        self._columns = columns
        self._positions: dict[int, Ints] = {}
        """Axis positions by slot, up to the end of the last grid."""

    def admit(self, slot: int, grids: Sequence[GridSpan]) -> None:
        """Compute the axis positions of a request that enters the batch."""
        self._positions.pop(slot, None)
        if not grids:
            return
        positions_AL, shift = axes_of_grids(grids)
        self._positions[slot] = positions_AL
        self._columns.grids_end_S[slot] = positions_AL.shape[1]
        self._columns.axes_shift_S[slot] = shift

    def of(self, slots_T: Ints, positions_T: Ints) -> Ints:
        """Return the axis positions of some tokens, shape AT."""
        columns = self._columns
        axes_AT = np.tile(positions_T + columns.axes_shift_S[slots_T], (NUM_AXES, 1))
        in_grids_T = positions_T < columns.grids_end_S[slots_T]
        for slot in np.unique(slots_T[in_grids_T]).tolist():
            rows = in_grids_T & (slots_T == slot)
            axes_AT[:, rows] = self._positions[slot][:, positions_T[rows]]
        return axes_AT


def axes_of_grids(grids: Sequence[GridSpan]) -> tuple[Ints, int]:
    """Return the axis positions up to the end of the last grid, and the offset that later positions add."""
    parts, end, following = [], 0, 0
    for one in grids:
        num_before = one.start - end
        parts.append(np.tile(np.arange(num_before) + following, (NUM_AXES, 1)))
        following += num_before
        grid_AL = np.indices(one.grid).reshape(NUM_AXES, -1)
        # In float32, as in training.
        grid_AL[0] = np.floor(grid_AL[0].astype(np.float32) * np.float32(one.frame_step)).astype(np.int64)
        parts.append(grid_AL + following)
        following += int(grid_AL.max()) + 1
        end = one.start + grid_AL.shape[1]
    return np.concatenate(parts, axis=1), following - end
