"""`StepHistory`: how large the latest steps were and how long they took. Nothing is decided by it."""

from collections import deque

from octavo.core_proc.scheduler.delta import StepRecord
from octavo.protocol.snapshot import StepSample

LENGTH = 240
"""Steps that are kept: some seconds of decoding."""


class StepHistory:
    """The latest steps, in order."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, int, int, float]] = deque(maxlen=LENGTH)

    def add(self, record: StepRecord, elapsed_s: float) -> None:
        """Count a step whose result has come.

        Args:
            record: what it computed.
            elapsed_s: the time it took in the worker.
        """
        num_decode = num_prefill = 0
        for part in record.parts:
            if part.num_tokens == 1 and part.start >= part.request.num_prompt_tokens:
                num_decode += 1
            else:
                num_prefill += part.num_tokens
        self._steps.append((record.sequence, len(record.parts), num_decode, num_prefill, elapsed_s))

    def samples(self) -> list[StepSample]:
        """Return the steps, oldest first."""
        return [StepSample(*step) for step in self._steps]
