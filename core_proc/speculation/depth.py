"""How many tokens to draft: by how often a request's drafts are right, and by what one more row costs a step.

Knows no clock: the time of each step comes with its result, so a recording holds it and replays to the same plans.
"""

LEARNING_RATE = 0.2
"""The weight of a new observation, of a draft and of a step."""

FIRST_ACCEPTANCE = 0.7
"""The probability of a draft before any of its request was checked: a match of several tokens is often right."""

MIN_GAIN = 0.05
"""Tokens that the first draft must be worth beyond its row: the step after it cannot be planned ahead."""

FIRST_NOT_AHEAD_PRICE = 0.15
"""The part of a step's time that is lost if it is not planned ahead, as long as nothing is measured."""

REQUESTS_PER_REST = 8
"""Drafts from grammars take the core's time: after they were not worth it, a step is left out for so many requests."""

MAX_RESTS = 16
"""Each further time that they are not worth it, twice as many steps are left out, up to so many."""

PROBE_STEPS = 64
"""After so many steps without drafts, the workers draft one token: the text may have become easier to draft."""

DOUBLING_ROWS = 64.0
"""A step of so many rows takes twice as long as the smallest one, as long as nothing is measured."""

MAX_STEP_FACTOR = 3.0
"""A step that took so many times as long as expected counts as if it had not: something else disturbed it."""


class StepCost:
    """The time of a step as a linear function of its rows, learned from steps without prompts.

    The regression is over exponentially weighted averages. While all steps have the same size, it keeps the slope of
    `DOUBLING_ROWS`.
    """

    def __init__(self) -> None:
        self._mean_s = self._mean_rows = 0.0
        self._variance = self._covariance = 0.0

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        """Learn from a step that has computed `num_rows` tokens of outputs in `elapsed_s` seconds."""
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
        """Return how many tokens a step of `num_requests` rows would deliver in the time that one more row takes."""
        if not self._mean_s:
            return num_requests / (DOUBLING_ROWS + num_requests)
        return min(1.0, self._slope_s * num_requests / self.step_s(num_requests))

    def step_s(self, num_rows: int) -> float:
        """Return the time of a step of so many rows; 0.0 as long as nothing is measured."""
        return max(self._mean_s + self._slope_s * (num_rows - self._mean_rows), 0.1 * self._mean_s)

    @property
    def _slope_s(self) -> float:
        """The time of one more row."""
        prior_s = self._mean_s / (DOUBLING_ROWS + self._mean_rows)
        slope_s = (self._covariance + prior_s) / (self._variance + 1.0)
        return min(max(slope_s, 0.0), self._mean_s / max(self._mean_rows, 1.0))


class NotAheadCost:
    """The time that is lost if a step is not planned ahead: workers wait until the core has read the last result.

    In seconds, because it hardly depends on what a step computes: a part of a short step, little of a long one.
    """

    def __init__(self) -> None:
        self._idle_s: dict[bool, float] = {}
        """The mean time for which workers had nothing to compute, before steps that were and were not planned ahead."""

    def observe(self, idle_s: float, *, is_ahead: bool) -> None:
        """Learn from a step before which workers had nothing to compute for `idle_s` seconds; -1.0: unknown."""
        if idle_s < 0.0:
            return
        mean_s = self._idle_s.setdefault(is_ahead, idle_s)
        # The mean before planned steps may be 0.0, so the limit is not a multiple of it alone.
        limit_s = MAX_STEP_FACTOR * max(self._idle_s.values())
        self._idle_s[is_ahead] = mean_s + LEARNING_RATE / 4 * (min(idle_s, limit_s or idle_s) - mean_s)

    def price(self, step_s: float) -> float:
        """Return the lost part of a step that takes `step_s` seconds; with `step_s` 0.0, which means unknown, the
        default price."""
        if False not in self._idle_s or step_s <= 0.0:
            return FIRST_NOT_AHEAD_PRICE
        return min(1.0, max(0.0, self._idle_s[False] - self._idle_s.get(True, 0.0)) / step_s)


class DraftCost:
    """The time in which the workers draft one token of each request, as a part of the time of a step without drafts."""

    def __init__(self) -> None:
        self.price = 0.0
        """How many tokens of a request a step would deliver in the time of one draft."""

    def observe(self, num_drafts: int, drafts_s: float, elapsed_s: float) -> None:
        """Learn from a step of `elapsed_s` seconds, `drafts_s` of which went into `num_drafts` tokens of a request."""
        if drafts_s <= 0.0 or elapsed_s <= drafts_s:
            return
        price = drafts_s / num_drafts / (elapsed_s - drafts_s)
        if not self.price:
            self.price = min(1.0, price)
        # A draft model that lacks keys computes them before it drafts, which says nothing of the next drafts.
        self.price += LEARNING_RATE / 4 * (min(price, 1.0, MAX_STEP_FACTOR * self.price) - self.price)


class Depth:
    """How many tokens of one request are drafted."""

    __slots__ = ("acceptance", "expected", "expected_at", "first_acceptance", "max_depth")

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.first_acceptance = self.acceptance = FIRST_ACCEPTANCE
        """Probability that the first draft is right, and that a later one is if those before it are: the text that a
        draft is from may be the wrong one, or the right one for many tokens."""
        self.expected = self.expected_at = -1
        """A draft that no step verifies, and its position: it becomes known anyway, and is learned from for free."""

    def learn(self, num_right: int, *, was_wrong: bool) -> None:
        """Learn from drafts: `num_right` were right, and then one was wrong or there was none left."""
        if num_right or was_wrong:
            self.first_acceptance += LEARNING_RATE * ((num_right > 0) - self.first_acceptance)
        for _ in range(num_right - 1):
            self.acceptance += LEARNING_RATE * (1.0 - self.acceptance)
        if was_wrong and num_right:
            self.acceptance -= LEARNING_RATE * self.acceptance

    def choose(self, row_price: float) -> int:
        """Return how many tokens to draft: each must be worth more than its row, and than the draft if it is one."""
        value = self.first_acceptance
        if value < row_price + MIN_GAIN:
            return 0
        depth = 0
        while depth < self.max_depth and value > row_price:
            depth += 1
            value *= self.acceptance
        return depth

    def gain(self, num_draft_tokens: int, row_price: float) -> float:
        """Return how many tokens so many drafts are worth beyond their rows."""
        gain, value = 0.0, self.first_acceptance
        for _ in range(num_draft_tokens):
            gain += value - row_price
            value *= self.acceptance
        return gain


class FixedDepth(Depth):
    """Always the most tokens, as if all drafts were right and cost nothing."""

    __slots__ = ()

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)
        self.first_acceptance = self.acceptance = 1.0

    def learn(self, num_right: int, *, was_wrong: bool) -> None:
        """Stay as it is."""
