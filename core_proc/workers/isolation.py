"""Decides which of the engines that share steps runs its crash suspects while the others run no requests.

A step contains the tokens of all engines. So a crash can be attributed to a request only if no other engine had a
request in the step. The first engine decides: an engine that wants to isolate suspects waits for its turn, and until
the others have no request in flight.
"""

from octavo.protocol.lock_step import IsolationState, IsolationTurn

NOBODY = -1
"""Stands for no engine: all engines run their requests."""


class IsolationTurns:
    """The isolation decisions of the first engine.

    Args:
        num_engines: number of engines that share steps.
    """

    def __init__(self, num_engines: int) -> None:
        self._states = {engine: IsolationState() for engine in range(num_engines)}
        self.turn = IsolationTurn()
        """The latest decision, which all engines must know."""

    def update(self, engine: int, state: IsolationState) -> bool:
        """Record the report of an engine. Return whether `turn` has changed."""
        self._states[engine] = state
        return self._decide()

    def leave(self, engine: int) -> bool:
        """Record that an engine will have no more requests. Return whether `turn` has changed."""
        del self._states[engine]
        return self._decide()

    def _decide(self) -> bool:
        before = self.turn
        waiting = sorted(engine for engine, state in self._states.items() if state.wants_turn)
        if before.engine not in waiting:
            engine = waiting[0] if waiting else NOBODY
            if engine != before.engine:
                self.turn = IsolationTurn(before.number + 1, engine)
        number = self.turn.number
        if not self.turn.is_alone and self.turn.engine != NOBODY:
            others = [state for engine, state in self._states.items() if engine != self.turn.engine]
            if all(state.idle_in == number for state in others):
                self.turn = IsolationTurn(number, self.turn.engine, is_alone=True)
        return self.turn != before
