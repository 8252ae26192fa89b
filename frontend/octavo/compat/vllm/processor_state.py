"""`process_dict_updates`: maintains a logits processor's state of each request, by its index in the batch."""

from collections.abc import Callable
from typing import TypeVar

from octavo.protocol.logits_processor import BatchUpdate, MoveDirectionality
from octavo.protocol.params import SamplingParams

T = TypeVar("T")


def process_dict_updates(
    states: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply the changes of a batch to the states of its requests; return whether a state has changed.

    Args:
        states: by index in the batch; changed in place.
        batch_update: `None` if nothing has changed.
        new_state: returns the state of a new request, given its parameters, prompt and output tokens; `None` for no
            state.
    """
    if batch_update is None:
        return False
    before = dict(states)
    for index in batch_update.removed:
        states.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        states.pop(index, None)
        if (state := new_state(params, prompt, output)) is not None:
            states[index] = state
    for source, target, direction in batch_update.moved:
        moving, staying = states.pop(source, None), states.pop(target, None)
        if moving is not None:
            states[target] = moving
        if direction is MoveDirectionality.SWAP and staying is not None:
            states[source] = staying
    return states != before
