"""The arrays of one forward pass, as the model and the attention see them.

Holds no request: who owns a row, and what is sampled from it, is the persistent batch's business.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PENDING = -1
"""In the place of a token that a device has sampled, or is about to, and the host does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A ragged batch of R requests, whose tokens lie one after another in T rows."""

    token_ids_T: Ints
    """`PENDING` where a token was sampled that the host does not know yet."""
    positions_T: Ints
    """The position of each token in its request, consecutive within a request."""
    query_starts: Ints
    """R + 1 offsets into T: request r computes the rows [query_starts[r], query_starts[r + 1])."""
    context_lens: Ints
    """R; keys and values of each request, those of this step included."""
    block_table_RP: npt.NDArray[np.int32]
    """The blocks of each request in order, padded with any valid block number; contiguous."""
    slots_T: Ints
    """The slot of each token's request, in the persistent batch."""
    slot_mapping_T: Ints
    """Block number * block_size + offset: where each token's key and value go."""
