"""Locations of the recurrent states of a step's requests. The core decides them."""

from collections.abc import Container

import numpy as np
import numpy.typing as npt

from octavo.protocol.errors import ProtocolError
from octavo.protocol.steps import StepPlan
from octavo.worker_proc.batch.inputs import Ints, StateInputs


class StateMoves:
    """States that a step reads from other slots than its requests' lists say; see `StepPlan.state_moves`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sources: dict[int, int] = {}

    def __contains__(self, slot: int) -> bool:
        """Return whether the state of a slot moves in this step."""
        return slot in self._sources

    def apply(self, plan: StepPlan, table: npt.NDArray[np.int32], slots: Container[int]) -> None:
        """Take the moves of a plan. `table` has the state slots of all batch slots; `slots` has the occupied batch
        slots.

        Raises:
            ProtocolError: the step does not schedule a request whose state moves.
        """
        if not plan.state_moves and not self._sources:
            return
        self._sources = {slot: source for slot, source, _ in plan.state_moves}
        ends = {entry.slot: entry.start + entry.num_tokens for entry in plan.scheduled}
        for slot, _, destination in plan.state_moves:
            if slot not in slots or slot not in ends:
                raise ProtocolError(f"the state of slot {slot} moves, but the step does not continue it")
            table[slot, (ends[slot] - 1) // self._block_size :] = destination

    def inputs(self, table: npt.NDArray[np.int32], slots_R: Ints, starts_R: Ints, ends_R: Ints) -> StateInputs:
        """Return the slots of the states before `starts_R`, and after the positions before `ends_R`."""
        sources_R = table[slots_R, (starts_R - 1) // self._block_size]
        sources_R[starts_R == 0] = -1
        for slot, source in self._sources.items():
            sources_R[slots_R == slot] = source
        return StateInputs(sources_R, table[slots_R, (ends_R - 1) // self._block_size])
