"""How many decode steps a plan has.

Between two plans the workers wait for the core, or share their cores with it. A plan of several steps pays that once,
but a request that arrives meanwhile waits until its end. Reads no clock: results have the times of their steps.
"""

MAX_SECONDS = 0.02
"""What a plan of several steps may take. Streams get its tokens together, and a new request waits for its end."""


class MultiStep:
    """Limits the decode steps of a plan by the measured time of such a step.

    Args:
        max_steps: of a plan; 1: each step has a plan of its own.
        target_s: how long a plan should take, in seconds, if that is less than `MAX_SECONDS`; 0: no target.
    """

    def __init__(self, max_steps: int, target_s: float = 0.0) -> None:
        self._max_steps = max_steps
        self._max_s = min(MAX_SECONDS, target_s or MAX_SECONDS)
        self._step_s = 0.0
        self._num_requests = 0
        """Of the step that took so long; 0: none was measured."""

    def observe(self, num_requests: int, step_s: float) -> None:
        """Learn what a step has taken in which so many requests decoded, one token each, and nothing else happened."""
        self._num_requests, self._step_s = num_requests, step_s

    def max_steps(self, num_requests: int) -> int:
        """Return how many decode steps of this many requests may share a plan.

        One, if steps of so many have not been measured: they take longer than those of fewer.
        """
        if self._max_steps == 1 or not 0 < num_requests <= self._num_requests:
            return 1
        num_in_time = self._max_s / self._step_s if self._step_s > 0.0 else self._max_steps
        return max(1, min(self._max_steps, int(num_in_time)))
