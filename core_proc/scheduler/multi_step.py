"""Decides how many decode steps a plan has.

Between two plans the workers wait for the core, or share their CPU cores with it. A plan of several steps pays this
overhead once. A request that arrives meanwhile waits until the plan ends, or, if workers interrupt plans, until the
present step ends. Reads no clock: results carry durations.
"""

MAX_SECONDS = 0.02
"""Longest duration of a multi-step plan in seconds. Its tokens are streamed together, and new requests wait for its
end."""
MAX_INTERRUPTIBLE_SECONDS = 0.04
"""Longest duration in seconds if the workers end a plan when the next one arrives: only its own streams wait."""


class MultiStep:
    """Limits the decode steps of a plan by the measured duration of a decode step.

    Args:
        max_steps: most steps of a plan; 1: every step has its own plan.
        target_s: target duration of a plan in seconds, if less than the longest duration; 0: no target.
        is_interruptible: whether the workers end a plan when the next one arrives.
    """

    def __init__(self, max_steps: int, target_s: float = 0.0, *, is_interruptible: bool = False) -> None:
        self._max_steps = max_steps
        longest_s = MAX_INTERRUPTIBLE_SECONDS if is_interruptible else MAX_SECONDS
        self._max_s = min(longest_s, target_s or longest_s)
        self._step_s = 0.0
        self._num_requests = 0
        """Number of requests in the step with duration `_step_s`; 0 if no step was measured."""

    def observe(self, num_requests: int, step_s: float) -> None:
        """Learn the duration of a step in which this many requests decoded one token each, and nothing else
        happened."""
        self._num_requests, self._step_s = num_requests, step_s

    def max_steps(self, num_requests: int) -> int:
        """Return how many decode steps of this many requests may share a plan.

        This is 1 unless a step with at least this many requests was measured: more requests take longer.
        """
        if self._max_steps == 1 or not 0 < num_requests <= self._num_requests:
            return 1
        num_in_time = self._max_s / self._step_s if self._step_s > 0.0 else self._max_steps
        return max(1, min(self._max_steps, int(num_in_time)))
