"""Decides how many tokens to draft, from the acceptance rate of a request's drafts and the cost of one more row in a
step.

Reads no clock: the time of each step comes with its result. A recording contains it, so it replays to the same plans.
"""

LEARNING_RATE = 0.2
"""Weight of a new observation of a draft or a step."""

FIRST_ACCEPTANCE = 0.7
"""Assumed acceptance probability before any draft of a request was verified: a match of several tokens is often
right."""

MIN_GAIN = 0.05
"""Tokens that the first draft must gain beyond the cost of its row: the step after it cannot be planned ahead."""

FIRST_NOT_AHEAD_PRICE = 0.15
"""Assumed fraction of a step's time that is lost if the step is not planned ahead, until it was measured."""

REQUESTS_PER_REST = 8
"""Drafting from grammars costs the core time. After it did not pay off, one step per this many requests is skipped."""

MAX_RESTS = 16
"""Each further time that it does not pay off, twice as many steps are skipped, up to this many."""

PROBE_STEPS = 64
"""After this many steps without drafts, the workers draft one token: the text may have become easier to draft."""

DOUBLING_ROWS = 64.0
"""Assumed number of rows at which a step takes twice as long as the smallest one, until it was measured."""

MAX_STEP_FACTOR = 3.0
"""Durations above this multiple of the expected one are clipped to it: something else disturbed the step."""


class StepCost:
    """The time of a step as a linear function of its rows, learned from steps without prompts.

    The regression uses exponentially weighted averages. While all steps have the same size, it keeps the slope given by
    `DOUBLING_ROWS`.
    """

    def __init__(self) -> None:
        self._mean_s = self._mean_rows = 0.0
        self._variance = self._covariance = 0.0

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        """Learn from a step that has computed `num_rows` output tokens in `elapsed_s` seconds."""
        if elapsed_s <= 0.0:
            return
        if not self._mean_s:
            self._mean_s, self._mean_rows = elapsed_s, float(num_rows)
            return
        error_rows = num_rows - self._mean_rows
        expected_s = self._mean_s + max(0.0, error_rows) * self._slope_s
        error_s = min(elapsed_s, MAX_STEP_FACTOR * expected_s) - self._mean_s
        rate, keep = LEARNING_RATE / 4, 1.0 - LEARNING_RATE / 4
        self._variance = keep * (self._variance + rate * error_rows * error_rows)
        self._covariance = keep * (self._covariance + rate * error_rows * error_s)
        self._mean_s += rate * error_s
        self._mean_rows += rate * error_rows

    def row_price(self, num_requests: int) -> float:
        """Return how many tokens a step of `num_requests` rows would deliver in the time of one more row."""
        if not self._mean_s:
            return num_requests / (DOUBLING_ROWS + num_requests)
        return min(1.0, self._slope_s * num_requests / self.step_s(num_requests))

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a step with this many rows; 0.0 until it was measured."""
        return max(self._mean_s + self._slope_s * (num_rows - self._mean_rows), 0.1 * self._mean_s)

    @property
    def _slope_s(self) -> float:
        """Seconds per additional row."""
        prior_s = self._mean_s / (DOUBLING_ROWS + self._mean_rows)
        slope_s = (self._covariance + prior_s) / (self._variance + 1.0)
        return min(max(slope_s, 0.0), self._mean_s / max(self._mean_rows, 1.0))


class NotAheadCost:
    """The time lost if a step is not planned ahead: the workers wait until the core has read the last result.

    It is in seconds, because it hardly depends on what a step computes: it matters for a short step, but not for a long
    one.
    """

    def __init__(self) -> None:
        self._idle_s: dict[bool, float] = {}
        """Mean idle seconds of the workers before steps that were (True) and were not (False) planned ahead."""

    def observe(self, idle_s: float, *, is_ahead: bool) -> None:
        """Learn from a step before which the workers were idle for `idle_s` seconds; -1.0 if unknown."""
        if idle_s < 0.0:
            return
        mean_s = self._idle_s.setdefault(is_ahead, idle_s)
        # The mean before planned-ahead steps may be 0.0, so the limit is not just a multiple of it.
        limit_s = MAX_STEP_FACTOR * max(self._idle_s.values())
        self._idle_s[is_ahead] = mean_s + LEARNING_RATE / 4 * (min(idle_s, limit_s or idle_s) - mean_s)

    def price(self, step_s: float) -> float:
        """Return the lost fraction of a step that takes `step_s` seconds. Return the default if `step_s` is 0.0
        (unknown)."""
        if False not in self._idle_s or step_s <= 0.0:
            return FIRST_NOT_AHEAD_PRICE
        return min(1.0, max(0.0, self._idle_s[False] - self._idle_s.get(True, 0.0)) / step_s)


class DraftCost:
    """The time in which the workers draft one token per request, as a fraction of the time of a step without drafts."""

    def __init__(self) -> None:
        self.price = 0.0
        """Number of tokens per request that a step would deliver in the time of one draft."""

    def observe(self, num_drafts: int, drafts_s: float, elapsed_s: float) -> None:
        """Learn from a step of `elapsed_s` seconds, of which `drafts_s` were spent drafting `num_drafts` tokens per
        request."""
        if drafts_s <= 0.0 or elapsed_s <= drafts_s:
            return
        price = drafts_s / num_drafts / (elapsed_s - drafts_s)
        if not self.price:
            self.price = min(1.0, price)
        # A draft model that lacks KV computes it first. This time says nothing about the next drafts, so it is clipped.
        self.price += LEARNING_RATE / 4 * (min(price, 1.0, MAX_STEP_FACTOR * self.price) - self.price)


class Depth:
    """The number of tokens to draft for one request."""

    __slots__ = ("acceptance", "expected", "expected_at", "first_acceptance", "max_depth")

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.first_acceptance = self.acceptance = FIRST_ACCEPTANCE
        """Probability that the first draft is accepted, and that a later one is if all before it are. They differ
        because the draft's source text may be the wrong one, or the right one for many tokens."""
        self.expected = self.expected_at = -1
        """A draft that no step verifies, and its position. The token becomes known anyway, so learning from it is
        free."""

    def learn(self, num_right: int, *, was_wrong: bool) -> None:
        """Learn from drafts: `num_right` were accepted, and then one was rejected or none was left."""
        if num_right or was_wrong:
            self.first_acceptance += LEARNING_RATE * ((num_right > 0) - self.first_acceptance)
        for _ in range(num_right - 1):
            self.acceptance += LEARNING_RATE * (1.0 - self.acceptance)
        if was_wrong and num_right:
            self.acceptance -= LEARNING_RATE * self.acceptance

    def choose(self, row_price: float) -> int:
        """Return how many tokens to draft. Each must gain more than its row costs, and the first one `MIN_GAIN`
        more."""
        value = self.first_acceptance
        if value < row_price + MIN_GAIN:
            return 0
        depth = 0
        while depth < self.max_depth and value > row_price:
            depth += 1
            value *= self.acceptance
        return depth

    def gain(self, num_draft_tokens: int, row_price: float) -> float:
        """Return how many tokens this many drafts are expected to gain beyond the cost of their rows."""
        gain, value = 0.0, self.first_acceptance
        for _ in range(num_draft_tokens):
            gain += value - row_price
            value *= self.acceptance
        return gain


class FixedDepth(Depth):
    """Always drafts the maximum, as if all drafts were accepted and cost nothing."""

    __slots__ = ()

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)
        self.first_acceptance = self.acceptance = 1.0

    def learn(self, num_right: int, *, was_wrong: bool) -> None:
        """Do nothing: the depth is fixed."""
