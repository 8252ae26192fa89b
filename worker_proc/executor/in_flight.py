"""Steps in flight, and the thread that notices when a device has finished one."""

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.protocol.adapters import AdapterFault
from octavo.protocol.events import PooledOutput
from octavo.protocol.steps import StepFault
from octavo.worker_proc.batch.inputs import Ints, StepEntries
from octavo.worker_proc.device.stream import DeviceEvent
from octavo.worker_proc.executor.runner import PendingLogprobs, PendingSamples, Samples
from octavo.worker_proc.media.aligner import Alignments
from octavo.worker_proc.runners.rounds import Drafts, PendingDrafts


@dataclass(slots=True, eq=False)
class PromptChunk:
    """Prompt tokens whose logprobs a step reports."""

    slot: int
    token_ids: list[int]
    logprobs: PendingLogprobs


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One step between `begin` and its result."""

    sequence: int
    started_s: float
    num_tokens: int
    """Rows of the forward pass."""
    samples: Samples | None
    """Samples of the step; `None` if the plan schedules nothing."""
    output: PendingSamples | None
    """Sampled tokens; `None` if nothing is sampled."""
    prompts: Sequence[PromptChunk]
    event: DeviceEvent
    """`output` and `prompts` are readable once this event is done."""
    faults: Sequence[StepFault] = ()
    adapter_faults: Sequence[AdapterFault] = ()
    is_known_N: npt.NDArray[np.bool_] | None = None
    """Samples whose tokens the batch already knows; `None` if it knows none."""
    entries: StepEntries | None = None
    """Entries of the step, for the drafter."""
    query_starts: Ints | None = None
    alignments: Alignments | None = None
    """Alignments of the step's requests; `None` if there are none."""
    pooled: Sequence[PooledOutput] = ()
    """Pooled outputs, in sample order, once known."""
    num_drafts: int = 0
    """See `StepPlan`."""
    reads_drafts: bool = False
    """Whether the result must hold the ids of all drafts."""
    drafts: Drafts | PendingDrafts | None = None
    """Drafts that follow the step; `None` if nothing drafts, or if drafting has to wait for its tokens."""


class EventWatcher:
    """Makes a file descriptor readable whenever an event is done, so that one poll waits for events and commands.

    A thread waits for the events in order. `close` ends it.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._events: queue.SimpleQueue[DeviceEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device events", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._read_fd

    def add(self, event: DeviceEvent) -> None:
        """Enqueue an event behind earlier ones."""
        self._events.put(event)

    def acknowledge(self) -> None:
        """Make the file descriptor unreadable until the next event is done."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        """End the thread. Blocks until all added events are done."""
        self._events.put(None)
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            # A failed device raises here. The main thread gets the same error from the event.
            with contextlib.suppress(RuntimeError):
                event.wait()
            os.write(self._write_fd, b".")
