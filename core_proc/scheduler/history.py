"""`StepHistory`: sizes and durations of the latest steps, for the dashboard. No decision depends on it."""

from collections import deque

from octavo.core_proc.scheduler.delta import StepRecord
from octavo.protocol.snapshot import StepSample

LENGTH = 240
"""Number of steps kept: a few seconds of decoding."""


class StepHistory:
    """The latest steps, in order."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, int, int, float]] = deque(maxlen=LENGTH)

    def add(self, record: StepRecord, elapsed_s: float) -> None:
        """Add a step whose result has arrived.

        Args:
            record: the step.
            elapsed_s: its duration in the worker, in seconds.
        """
        num_prefill = record.num_tokens - record.num_decode_tokens
        self._steps.append((record.sequence, len(record.requests), record.num_decode_tokens, num_prefill, elapsed_s))

    def samples(self) -> list[StepSample]:
        """Return the steps, oldest first."""
        return [StepSample(*step) for step in self._steps]
