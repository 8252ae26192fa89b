"""Steps that are on the device, and what will be read of them when they are over."""

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.logprobs import RowLogprobs
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.device.stream import Mark


@dataclass(frozen=True, slots=True, eq=False)
class RowsLogprobs:
    """Logprobs of some rows in host buffers, there when their step is over."""

    chosen_R: Tensor
    rank_R: Tensor
    top_ids_RK: Tensor
    top_RK: Tensor

    def row(self, index: int, num_top: int) -> RowLogprobs:
        """Return those of one row, with so many of its most likely tokens."""
        top_ids_K, top_K = self.top_ids_RK[index, :num_top], self.top_RK[index, :num_top]
        return RowLogprobs(float(self.chosen_R[index]), int(self.rank_R[index]), top_ids_K.tolist(), top_K.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class DrawsLogprobs:
    """Logprobs of the draws of a step that ask for them, in order."""

    top: RowsLogprobs
    named: RowsLogprobs | None
    """Of tokens that requests name in the place of the most likely ones; None: none does."""

    def row(self, place: int, drawn: "Drawn") -> RowLogprobs:
        """Return those of one draw, the `place`-th of those that ask."""
        num_named = len(drawn.row.sampling.spec.logprob_token_ids)
        if self.named is not None and num_named:
            return self.named.row(place, num_named)
        return self.top.row(place, drawn.num_top or 0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token that a step draws."""

    row: Row
    position: int
    """Tokens before it."""
    num_top: int | None
    """Logprobs that are reported beside its own; None: not even that."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens whose logprobs a step reports."""

    slot: int
    token_ids: list[int]
    num_top: int
    logprobs: list[RowsLogprobs]
    """Of all tokens in order, in pieces."""


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One step on the device."""

    sequence: int
    started_s: float
    drawn: Sequence[Drawn]
    tokens_N: Tensor | None
    """In a host buffer; None: nothing is drawn."""
    logprobs: DrawsLogprobs | None
    """None: nobody asks."""
    prompts: Sequence[PromptPart]
    mark: Mark
    """When it is done, all of this is there."""


class Watch:
    """Makes a file descriptor readable whenever a mark is done, so that one poll can wait for it and for messages.

    A thread waits, one mark after another; it ends with `close`.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._marks: queue.SimpleQueue[Mark | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="marks", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return what to poll."""
        return self._read_fd

    def expect(self, mark: Mark) -> None:
        """Wait for a mark, after those before it."""
        self._marks.put(mark)

    def acknowledge(self) -> None:
        """Make the file descriptor unreadable until the next mark is done."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        """End the thread. Blocks until: the marks that it waits for are done."""
        self._marks.put(None)
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _run(self) -> None:
        while (mark := self._marks.get()) is not None:
            # Whoever asks the mark next is told of a device that has failed.
            with contextlib.suppress(RuntimeError):
                mark.wait()
            os.write(self._write_fd, b".")
