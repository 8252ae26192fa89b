"""`EngineState`: an engine's way from its start to its removal. Whether its core is alive is another matter."""

from enum import Enum

from octavo.protocol.errors import IllegalTransition


class EngineState(Enum):
    """What an engine is there for."""

    STARTING = "starting"
    """It gets no requests yet."""
    SERVING = "serving"
    DRAINING = "draining"
    """It gets no new requests and finishes those it has."""
    REMOVED = "removed"

    def move(self, target: "EngineState") -> "EngineState":
        """Return `target`.

        Raises:
            IllegalTransition: the table has no such transition.
        """
        if target not in ENGINE_TRANSITIONS[self]:
            raise IllegalTransition(f"engine: {self.value} to {target.value}")
        return target


ENGINE_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: frozenset({EngineState.SERVING, EngineState.REMOVED}),
    EngineState.SERVING: frozenset({EngineState.DRAINING}),
    EngineState.DRAINING: frozenset({EngineState.SERVING, EngineState.REMOVED}),
    EngineState.REMOVED: frozenset(),
}
