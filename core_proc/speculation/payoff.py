"""`Payoff`: measures whether drafting increases the tokens per second of a batch, by disabling it for some steps.

The depth of a draft follows from the cost of rows. Other costs show up in no step: masks of drafted positions and
searches for drafts take CPU time from the workers. So a batch with drafts is compared with the same batch without.
Reads no clock: times come with the results of steps, so a recording contains them.
"""

MIN_REQUESTS = 8
"""In smaller batches rows cost little, and the acceptance of a few requests varies from window to window."""

WINDOW_STEPS = 16
"""Number of steps in each window of a comparison."""

SETTLING_STEPS = 2
"""Number of steps at the beginning of a window that do not count, because they were planned before it."""

WINDOWS = (True, False, False, True)
"""Whether drafts are enabled in each window. This order is fair if the batch shrinks or grows meanwhile."""

FIRST_REST_STEPS = 512
"""Steps between two comparisons. If drafts cost a tenth of the rate, comparing costs half a percent of it."""

MAX_REST_STEPS = 8192
"""Each time that drafting does not pay off, the next comparison is twice as far away, up to this many steps."""

MIN_GAIN = 0.02
"""Fraction by which drafting must increase the rate. A smaller gain may be noise, and drafting must not lose by
chance."""

MAX_SIZE_FACTOR = 4 / 3
"""If the size of the batch has changed by a larger factor, it is compared anew."""

MAX_RESTING_SIZE_FACTOR = 2.0
"""The same factor while drafting is disabled. It is larger because a shrinking batch would be compared most of the
time, and each comparison costs time."""

MAX_STEP_FACTOR = 3.0
"""Durations above this multiple of the mean are clipped to it: something else disturbed the step."""


class Payoff:
    """Whether drafting pays off in the current batch."""

    def __init__(self) -> None:
        self.may_speculate = True
        """Whether the next steps may have drafts."""
        self._num_requests = 0
        """Size of the batch that is being compared or was judged; 0 if none."""
        self._verdict = True
        """Whether drafting paid off in the batch that was judged."""
        self._window = 0
        """Index of the current window in `WINDOWS`; its length once the batch is judged."""
        self._num_steps = 0
        """Number of steps in the window, or since the verdict."""
        self._num_tokens = {True: 0, False: 0}
        self._elapsed_s = {True: 0.0, False: 0.0}
        self._num_counted = 0
        self._rest_steps = FIRST_REST_STEPS

    def observe(self, num_requests: int, num_tokens: int, period_s: float, *, has_draft_tokens: bool) -> None:
        """Learn from a step without prompts.

        Args:
            num_requests: number of decoding requests.
            num_tokens: number of tokens that the step delivered.
            period_s: seconds between the end of the previous step and the end of this one.
            has_draft_tokens: whether the step has verified any drafts.
        """
        if num_requests < MIN_REQUESTS:
            if not self._is_judged:
                self._compare(0)
            self.may_speculate = True  # the verdict is kept, because batches of the same size often follow
            return
        if self._is_other_batch(num_requests):
            self._compare(num_requests if has_draft_tokens else 0)  # without drafts there is nothing to compare
            return
        self._num_steps += 1
        if self._is_judged:
            self.may_speculate = self._verdict
            if self._num_steps >= self._rest_steps:
                self._compare(0)
            return
        if self._num_steps > SETTLING_STEPS and period_s > 0.0:
            self._count(num_tokens, period_s)
        if self._num_steps == WINDOW_STEPS:
            self._window, self._num_steps = self._window + 1, 0
            if self._is_judged:
                self._compare_rates()
            else:
                self.may_speculate = WINDOWS[self._window]

    @property
    def _is_judged(self) -> bool:
        return self._window == len(WINDOWS)

    def _is_other_batch(self, num_requests: int) -> bool:
        if not self._num_requests:
            return True
        is_resting = self._is_judged and not self._verdict
        limit = MAX_RESTING_SIZE_FACTOR if is_resting else MAX_SIZE_FACTOR
        return max(num_requests, self._num_requests) > limit * min(num_requests, self._num_requests)

    def _compare(self, num_requests: int) -> None:
        """Start a comparison with the next step, or with the next draft if `num_requests` is 0."""
        self.may_speculate, self._num_requests = WINDOWS[0], num_requests
        self._window = self._num_steps = self._num_counted = 0
        self._num_tokens, self._elapsed_s = {True: 0, False: 0}, {True: 0.0, False: 0.0}

    def _count(self, num_tokens: int, period_s: float) -> None:
        total_s = sum(self._elapsed_s.values())
        if self._num_counted:
            period_s = min(period_s, MAX_STEP_FACTOR * total_s / self._num_counted)
        self._num_counted += 1
        self._num_tokens[self.may_speculate] += num_tokens
        self._elapsed_s[self.may_speculate] += period_s

    def _compare_rates(self) -> None:
        """Compare tokens per second with and without drafts."""
        with_drafts = self._num_tokens[True] * self._elapsed_s[False]
        without_drafts = self._num_tokens[False] * self._elapsed_s[True]
        self.may_speculate = self._verdict = with_drafts >= (1.0 + MIN_GAIN) * without_drafts
        self._rest_steps = FIRST_REST_STEPS if self.may_speculate else min(2 * self._rest_steps, MAX_REST_STEPS)
