"""`CopyCost`: whether contents that are elsewhere are copied to the device, or computed again because that is faster.

Knows no clock. The time of a copy from host memory is measured at the start and part of the `CachePlan`; the times of
steps and of loads from files come with their results. So a recording holds them and replays to the same plans.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

LEARNING_RATE = 0.2
"""The weight of a new load from files."""

FORGETTING_RATE = 0.01
"""The part of what loads from files have taught that a step with prompts takes away. Without it, files that were slow
once would never be tried again."""

MIN_CHANGE = 0.1
"""Changes of a price below this part of it change no decision: hits would have to be looked up again."""

REFERENCE_KEYS = 1024
"""The price of a token is compared at this context. The price of a key alone may be nearly zero, and then consists of
noise."""


StatePlace: TypeAlias = Literal["device", "host", "files"]
"""Where a recurrent state is."""


class CopyCost:
    """The prices of a block: from host memory, from a file, and computed.

    Nothing is computed instead of copied as long as no step was measured. Files count as fast as host memory until one
    load was measured.

    Args:
        host_block_s: seconds in which a block is copied from host memory; 0: unknown, so everything is copied.
        block_size: tokens of a block.
        host_state_s: seconds in which a recurrent state is copied from host memory.
    """

    def __init__(self, host_block_s: float, block_size: int, host_state_s: float = 0.0) -> None:
        self.has_changed = False
        """True once prices have changed; the reader resets it."""
        self._host_state_s = host_state_s
        self._host_block_s = host_block_s
        self._block_size = block_size
        self._measured = self._used = (0.0, 0.0, host_block_s)
        """Seconds of a token, of each key that it reads, and of a block from files: learned, and as decisions use
        them."""

    @property
    def is_known(self) -> bool:
        """Whether there is a choice."""
        return self._host_block_s > 0.0 and self._used[0] > 0.0

    def observe_step(self, token_s: float, key_s: float) -> None:
        """Learn what a token costs, with each of the keys that it reads."""
        file_s = self._measured[2]
        self._update(token_s, key_s, file_s + FORGETTING_RATE * (self._host_block_s - file_s))

    def observe_load(self, num_host_blocks: int, num_file_blocks: int, elapsed_s: float, num_states: int = 0) -> None:
        """Learn from a load that took `elapsed_s` seconds.

        Args:
            num_host_blocks: blocks from host memory.
            num_file_blocks: blocks from files.
            elapsed_s: of the load.
            num_states: recurrent states from files.
        """
        from_files = num_file_blocks + num_states * self._blocks_per_state
        if not from_files or elapsed_s <= 0.0:
            return
        token_s, key_s, file_s = self._measured
        measured_s = max(elapsed_s - num_host_blocks * self._host_block_s, 0.0) / from_files
        is_first = file_s == self._host_block_s
        self._update(token_s, key_s, measured_s if is_first else file_s + LEARNING_RATE * (measured_s - file_s))

    def best_end(self, first: int, num_host: Sequence[int], num_files: Sequence[int]) -> int:
        """Return at which block to stop copying and to compute the rest, so that both together take the least time.

        A token that is computed costs the more the more keys are before it, so this is the beginning or the end of a
        run of blocks that are elsewhere.

        Args:
            first: index of the first block.
            num_host: of each block from there on, over all groups, how many must come from host memory.
            num_files: likewise from files.
        """
        best, best_s = first, 0.0
        for index, saved_s in enumerate(self._saved_s(first, num_host, num_files), first):
            if saved_s >= best_s:
                best, best_s = index + 1, saved_s
        return best

    def is_worth_it(self, first: int, num_host: Sequence[int], num_files: Sequence[int], *, state: StatePlace) -> bool:
        """Return whether copying all of these blocks, see `best_end`, is faster than computing them.

        Args:
            first: index of the first block.
            num_host: of each block.
            num_files: likewise.
            state: where the recurrent state after the last block is.
        """
        *_, saved_s = 0.0, *self._saved_s(first, num_host, num_files)
        file_s = self._blocks_per_state * self._used[2]  # it comes to host memory first
        return saved_s >= {"device": 0.0, "host": self._host_state_s, "files": self._host_state_s + file_s}[state]

    @property
    def _blocks_per_state(self) -> float:
        """Of how many blocks a state has the bytes, if it is copied as fast."""
        return self._host_state_s / self._host_block_s if self._host_block_s else 0.0

    def _saved_s(self, first: int, num_host: Sequence[int], num_files: Sequence[int]) -> Iterator[float]:
        """Yield the seconds that are saved by not computing the first 1, 2, ... blocks: see `best_end`."""
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
            return  # everything is copied, whatever it costs
        prices = zip(_compared_prices(self._measured), _compared_prices(self._used), strict=True)
        if any(abs(new - old) > MIN_CHANGE * old for new, old in prices):
            self._used = self._measured
            self.has_changed = True


def _compared_prices(prices: tuple[float, float, float]) -> tuple[float, float]:
    """Return seconds of a token with `REFERENCE_KEYS` keys, and of a block from files."""
    token_s, key_s, file_s = prices
    return token_s + key_s * REFERENCE_KEYS, file_s
