"""Steps that were begun and are not over, and the thread that notices when a device has finished one."""

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
    """Rows of its forward pass."""
    samples: Samples | None
    """None: the plan schedules nothing."""
    output: PendingSamples | None
    """None: nothing is sampled."""
    prompts: Sequence[PromptChunk]
    event: DeviceEvent
    """When it is done, `output` and `prompts` are readable."""
    faults: Sequence[StepFault] = ()
    adapter_faults: Sequence[AdapterFault] = ()
    is_known_N: npt.NDArray[np.bool_] | None = None
    """The samples whose tokens the batch knows already; `None` if it knows none."""
    entries: StepEntries | None = None
    """What the step computes, for the drafter."""
    query_starts: Ints | None = None
    alignments: Alignments | None = None
    """Of requests that align; `None` if the step has none."""
    pooled: Sequence[PooledOutput] = ()
    """In the order of what was sampled, once that is known."""
    num_drafts: int = 0
    """See `StepPlan`."""
    reads_drafts: bool = False
    """Whether the result has the ids of all drafts."""
    drafts: Drafts | PendingDrafts | None = None
    """That follow it; `None` if nothing drafts, or not before its tokens are known."""


class EventWatcher:
    """Makes a file descriptor readable whenever an event is done, so that one poll can wait for events and commands.

    A thread waits for the events in order; it ends with `close`.
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
        """Wait for an event, after those before it."""
        self._events.put(event)

    def acknowledge(self) -> None:
        """Make the file descriptor unreadable until the next event is done."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        """End the thread. Blocks until: the events that it waits for are done."""
        self._events.put(None)
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            # A device that has failed raises here; the main thread gets the same error from the event.
            with contextlib.suppress(RuntimeError):
                event.wait()
            os.write(self._write_fd, b".")
