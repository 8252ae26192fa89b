"""`EngineState`: the lifecycle of an engine in a client. Whether the engine's core is alive is tracked elsewhere."""

from enum import Enum

from octavo.protocol.errors import IllegalTransition


class EngineState(Enum):
    """Which requests an engine gets."""

    STARTING = "starting"
    """Gets no requests yet."""
    SERVING = "serving"
    DRAINING = "draining"
    """Gets no new requests, and finishes the ones it has."""
    REMOVED = "removed"

    def move(self, target: "EngineState") -> "EngineState":
        """Return `target`, if the transition is allowed.

        Raises:
            IllegalTransition: the transition is not allowed.
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
