"""Hidden states of a model that a head or a projector reads: recorded and computed for every row of a step."""

from collections.abc import Callable, Sequence

from torch import Tensor


class Features:
    """Hidden states that a model passes to a draft head.

    Args:
        layers: layers before which the residual stream is passed on; the number of layers stands for the end. () to
            pass on the hidden states after the final norm.
        combine: makes one row from these, for each row of a step; `None` if each is passed on.
    """

    def __init__(self, layers: Sequence[int] = (), combine: Callable[[list[Tensor]], Tensor] | None = None) -> None:
        self.layers = frozenset(layers)
        self._combine = combine
        self._taken: list[Tensor] = []
        self.results: list[Tensor] = []
        """Features of the latest `forward`, each with one row per row of the step."""

    def take(self, x_TD: Tensor) -> None:
        """Take the residual stream before one of `layers`, in their order."""
        self._taken.append(x_TD)

    def finish(self, hidden_TD: Tensor) -> None:
        """Make `results`, given the hidden states after the final norm."""
        taken, self._taken = self._taken, []
        self.results = [self._combine(taken)] if self._combine is not None else taken or [hidden_TD]
