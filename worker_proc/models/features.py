"""Hidden states of a model that a head reads: recorded and computed for every row of a step, if there is a head."""

from collections.abc import Callable, Sequence

from torch import Tensor


class Features:
    """What a model passes on to its head.

    Args:
        layers: the residual stream before these layers is passed on, the number of layers standing for the end; ():
            the hidden states after the final norm are.
        combine: makes one row of these, for each row of a step.
    """

    def __init__(self, layers: Sequence[int] = (), combine: Callable[[list[Tensor]], Tensor] | None = None) -> None:
        self.layers = frozenset(layers)
        self._combine = combine
        self._taken: list[Tensor] = []
        self.rows_TD: Tensor | None = None
        """Of the latest `forward`."""

    def take(self, x_TD: Tensor) -> None:
        """Take the residual stream before one of `layers`, in their order."""
        self._taken.append(x_TD)

    def finish(self, hidden_TD: Tensor) -> None:
        """Make `rows_TD`, given the hidden states after the final norm."""
        taken, self._taken = self._taken, []
        self.rows_TD = self._combine(taken) if self._combine is not None else hidden_TD
