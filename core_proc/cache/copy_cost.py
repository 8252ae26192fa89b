"""`CopyCost`: decides whether cached contents outside the device are copied to it, or recomputed if that is faster.

Reads no clock. The time to copy a block from host memory is measured at start-up and part of the `CachePlan`. The times
of steps and of loads from files come with their results. So a recording contains them and replays to the same plans.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

LEARNING_RATE = 0.2
"""Weight of a new measurement of a load from files."""

FORGETTING_RATE = 0.01
"""Fraction of the learned cost of loads from files that each step with prompts forgets. Without it, files that were
slow once would never be tried again."""

MIN_CHANGE = 0.1
"""Relative changes of a cost below this do not change decisions. Otherwise hits would have to be looked up again."""

REFERENCE_KEYS = 1024
"""Context length at which the costs of a token are compared. The cost per key alone may be nearly zero, and then it is
mostly noise."""


StatePlace: TypeAlias = Literal["device", "host", "files"]
"""Where a recurrent state is stored."""


class CopyCost:
    """The costs of a block: copied from host memory, loaded from a file, or computed.

    Everything is copied until the first step was measured. Files count as fast as host memory until the first load was
    measured.

    Args:
        host_block_s: seconds to copy a block from host memory; 0 if unknown, and then everything is copied.
        block_size: tokens per block.
        host_state_s: seconds to copy a recurrent state from host memory.
    """

    def __init__(self, host_block_s: float, block_size: int, host_state_s: float = 0.0) -> None:
        self.has_changed = False
        """True after costs have changed. The reader resets it."""
        self._host_state_s = host_state_s
        self._host_block_s = host_block_s
        self._block_size = block_size
        self._measured = self._used = (0.0, 0.0, host_block_s)
        """Seconds per token, per key that it reads, and per block from files: as measured, and as used for
        decisions."""

    @property
    def is_known(self) -> bool:
        """Whether the costs are known, so that there is a choice."""
        return self._host_block_s > 0.0 and self._used[0] > 0.0

    def observe_step(self, token_s: float, key_s: float) -> None:
        """Learn the cost in seconds of a token and of each key that it reads."""
        file_s = self._measured[2]
        self._update(token_s, key_s, file_s + FORGETTING_RATE * (self._host_block_s - file_s))

    def observe_load(self, num_host_blocks: int, num_file_blocks: int, elapsed_s: float, num_states: int = 0) -> None:
        """Learn from a load that took `elapsed_s` seconds.

        Args:
            num_host_blocks: number of blocks from host memory.
            num_file_blocks: number of blocks from files.
            elapsed_s: duration of the load in seconds.
            num_states: number of recurrent states from files.
        """
        from_files = num_file_blocks + num_states * self._blocks_per_state
        if not from_files or elapsed_s <= 0.0:
            return
        token_s, key_s, file_s = self._measured
        measured_s = max(elapsed_s - num_host_blocks * self._host_block_s, 0.0) / from_files
        is_first = file_s == self._host_block_s
        self._update(token_s, key_s, measured_s if is_first else file_s + LEARNING_RATE * (measured_s - file_s))

    def best_end(self, first: int, num_host: Sequence[int], num_files: Sequence[int]) -> int:
        """Return the block index at which to stop copying and start computing, so that both together take the least
        time.

        Computing a token costs more the more keys precede it. So the result is the beginning or the end of a run of
        blocks that are not on the device.

        Args:
            first: index of the first block.
            num_host: for each block from `first` on, how many must be copied from host memory, over all groups.
            num_files: likewise, how many must be loaded from files.
        """
        best, best_s = first, 0.0
        for index, saved_s in enumerate(self._saved_s(first, num_host, num_files), first):
            if saved_s >= best_s:
                best, best_s = index + 1, saved_s
        return best

    def is_worth_it(self, first: int, num_host: Sequence[int], num_files: Sequence[int], *, state: StatePlace) -> bool:
        """Return whether copying all of these blocks is faster than computing them; arguments as for `best_end`.

        Args:
            first: index of the first block.
            num_host: per block, as for `best_end`.
            num_files: per block, as for `best_end`.
            state: where the recurrent state after the last block is stored.
        """
        *_, saved_s = 0.0, *self._saved_s(first, num_host, num_files)
        file_s = self._blocks_per_state * self._used[2]  # it is loaded to host memory first
        return saved_s >= {"device": 0.0, "host": self._host_state_s, "files": self._host_state_s + file_s}[state]

    @property
    def _blocks_per_state(self) -> float:
        """Number of blocks with as many bytes as a state, if both are copied at the same speed."""
        return self._host_state_s / self._host_block_s if self._host_block_s else 0.0

    def _saved_s(self, first: int, num_host: Sequence[int], num_files: Sequence[int]) -> Iterator[float]:
        """Yield the seconds saved by copying the first 1, 2, ... blocks instead of computing them; see `best_end`."""
        token_s, key_s, file_s = self._used
        saved_s = 0.0
        for index, (from_host, from_files) in enumerate(zip(num_host, num_files, strict=True), first):
            num_keys = (index + 0.5) * self._block_size
            saved_s += self._block_size * (token_s + key_s * num_keys)
            saved_s -= from_host * self._host_block_s + from_files * file_s
            yield saved_s

    def _update(self, *measured: float) -> None:
        self._measured = (measured[0], measured[1], measured[2])
        if self._host_block_s <= 0.0:
            return  # everything is copied at any cost
        prices = zip(_compared_prices(self._measured), _compared_prices(self._used), strict=True)
        if any(abs(new - old) > MIN_CHANGE * old for new, old in prices):
            self._used = self._measured
            self.has_changed = True


def _compared_prices(prices: tuple[float, float, float]) -> tuple[float, float]:
    """Return the seconds per token with `REFERENCE_KEYS` keys, and per block from files."""
    token_s, key_s, file_s = prices
    return token_s + key_s * REFERENCE_KEYS, file_s
