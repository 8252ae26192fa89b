"""`Prefaulter`: touches the memory that the cache will need next, while the worker is idle.

Allocates no tensors. It knows only how many blocks have been in use.
"""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.kernels.native.memory import HUGE_PAGE_BYTES, SMALL_PAGE_BYTES
from octavo.protocol.steps import StepPlan

IDLE_MS = 5
"""Milliseconds without a command after which the worker counts as idle. A busy engine leaves gaps of at most 1 ms."""
PREFAULT_BYTES = 128 << 20
"""Bytes to prefault beyond the blocks in use. More serves larger bursts at full speed, but stays resident."""


class Prefaulter:
    """Touches the pages of the blocks in use and of the blocks after them, in each buffer of the cache.

    The kernel allocates and clears a huge page on its first write. This takes 3 ms on a virtual machine whose host must
    find the memory first (docs/performance.md). The pool hands out new blocks in order, so the next pages are known.

    Args:
        buffers: buffers of the cache, as bytes; each is divided evenly among the blocks. No other thread writes to
            them during `touch_page`.
        reserve_bytes: bytes to prefault beyond the blocks in use, all buffers together; at least a page of each.
    """

    def __init__(self, buffers: Sequence[Tensor], num_blocks: int, reserve_bytes: int = PREFAULT_BYTES) -> None:
        # numpy arrays, because tensors made in inference mode cannot be written outside of it.
        self._buffers = [buffer.numpy() for buffer in buffers]
        self._num_blocks = num_blocks
        self._num_used = 0
        self._reserve_bytes = HUGE_PAGE_BYTES * max(1, reserve_bytes // (HUGE_PAGE_BYTES * max(1, len(self._buffers))))
        """Bytes to prefault of each buffer."""
        self._next_page = [-(buffer.ctypes.data % HUGE_PAGE_BYTES) for buffer in self._buffers]
        """Offset in each buffer of the first huge page that is neither touched nor queued; negative if the page begins
        before the buffer."""
        self._queue: deque[tuple[int, int]] = deque()
        """Pages to touch: index of the buffer, and offset in it."""

    @property
    def has_pages(self) -> bool:
        """Whether there is a page to touch."""
        return bool(self._queue)

    def on_plan(self, plan: StepPlan, num_groups: int) -> None:
        """Note which blocks a plan uses.

        `num_groups`: number of cache groups with blocks. A further group has state slots, which are in other memory.
        """
        lists = [admitted.block_ids for admitted in plan.admitted] + [appended.block_ids for appended in plan.appended]
        blocks = (block_ids for groups in lists for block_ids in groups[:num_groups] if block_ids)
        num_used = 1 + max(map(max, blocks), default=-1)
        if num_used > self._num_used:
            self._num_used = num_used
            self._enqueue()

    def touch_page(self) -> None:
        """Touch one page. Blocks for a fraction of a millisecond, or for several if the host must find the memory."""
        index, offset = self._queue.popleft()
        # Writing the same value back makes the kernel allocate a page. Some systems lack huge pages for some memory.
        small_pages = slice(max(0, offset), offset + HUGE_PAGE_BYTES, SMALL_PAGE_BYTES)
        self._buffers[index][small_pages] = self._buffers[index][small_pages]

    def touch_pages(self, wait_for_command: Callable[[int], object]) -> None:
        """Touch all queued pages once no command has arrived for a moment.

        Args:
            wait_for_command: waits up to this many milliseconds for a command; returns true if there is one, which
                ends the loop. Called before each page.
        """
        wait_ms = IDLE_MS
        while self._queue and not wait_for_command(wait_ms):
            self.touch_page()
            wait_ms = 0

    def _enqueue(self) -> None:
        wanted: list[tuple[int, int]] = []
        for index, buffer in enumerate(self._buffers):
            end = min(len(buffer), self._num_used * len(buffer) // self._num_blocks + self._reserve_bytes)
            pages = range(self._next_page[index], end, HUGE_PAGE_BYTES)
            wanted.extend((offset, index) for offset in pages)
            self._next_page[index] += len(pages) * HUGE_PAGE_BYTES
        # The lowest offsets are needed first.
        self._queue.extend((index, offset) for offset, index in sorted(wanted))
