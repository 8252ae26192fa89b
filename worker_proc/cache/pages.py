"""`PagesAhead`: takes the memory that the cache will need next while the worker has nothing to do.

Allocates no tensor, and knows of blocks only how many have been in use.
"""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.kernels.native.memory import HUGE_PAGE_BYTES
from octavo.protocol.steps import StepPlan

IDLE_MS = 5
"""Without a command for so long the worker is idle: between two steps of a busy engine it waits for one at most."""
AHEAD_BYTES = 128 << 20
"""Memory to hold ready: more of it serves larger bursts at full speed, and is resident whether they come or not."""


class PagesAhead:
    """Touches the pages behind the blocks in use, in each buffer of the cache.

    The system gives a page when it is first written, and clears it. All layers come to the end of theirs in the same
    step, which then waits for some sixty pages: 0.3 s on a virtual machine whose host has to find the memory first
    (docs/performance.md). The pool hands out new blocks in order, so what is needed next is known.

    Args:
        buffers: bytes, each divided evenly among all blocks; nobody else writes to them during `take_page`.
        num_blocks: of the cache.
        ahead_bytes: how much of all buffers together is kept ready; a page of each at least.
    """

    def __init__(self, buffers: Sequence[Tensor], num_blocks: int, ahead_bytes: int = AHEAD_BYTES) -> None:
        # As arrays: tensors that were made in inference mode cannot be written outside of it.
        self._buffers = [buffer.numpy() for buffer in buffers]
        self._num_blocks = num_blocks
        self._num_used = 0
        self._ahead_bytes = HUGE_PAGE_BYTES * max(1, ahead_bytes // (HUGE_PAGE_BYTES * max(1, len(buffers))))
        """Of each buffer."""
        self._num_taken = [0] * len(buffers)
        """Bytes of each buffer that have been taken, or are about to be."""
        self._wanted: deque[tuple[int, int]] = deque()
        """Pages: a buffer's index, and an offset in it."""

    @property
    def has_wanted(self) -> bool:
        """True while there is a page to take."""
        return bool(self._wanted)

    def note(self, plan: StepPlan) -> None:
        """Learn from a plan which blocks are in use."""
        lists = [admitted.block_ids for admitted in plan.admitted] + [appended.block_ids for appended in plan.appended]
        num_used = max((max(block_ids) + 1 for block_ids in lists if block_ids), default=0)
        if num_used > self._num_used:
            self._num_used = num_used
            self._want()

    def take_page(self) -> None:
        """Take one of the wanted pages. Blocks for a fraction of a millisecond, or several where the host is asked."""
        index, offset = self._wanted.popleft()
        # The value stays as it is. Writing it is what makes the page be there.
        self._buffers[index][offset] = self._buffers[index][offset]

    def take_pages(self, comes_within: Callable[[int], object]) -> None:
        """Take all wanted pages in one go once nothing has come for a moment: so the worker soon rests.

        Args:
            comes_within: waits for a command for so many milliseconds at most; true if there is one, which ends this.
                Asked before each page.
        """
        wait_ms = IDLE_MS
        while self._wanted and not comes_within(wait_ms):
            self.take_page()
            wait_ms = 0

    def _want(self) -> None:
        wanted: list[tuple[int, int]] = []
        for index, buffer in enumerate(self._buffers):
            end = min(len(buffer), self._num_used * len(buffer) // self._num_blocks + self._ahead_bytes)
            wanted.extend((offset, index) for offset in range(self._num_taken[index], end, HUGE_PAGE_BYTES))
            self._num_taken[index] = max(self._num_taken[index], -(-end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        # Every buffer's next page before any buffer's second: those are needed first.
        self._wanted.extend((index, offset) for offset, index in sorted(wanted))
