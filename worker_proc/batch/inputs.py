"""The arrays of one forward pass, as the model and the attention see them.

Holds no request: who owns a row, and what is sampled from it, is the persistent batch's business.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A ragged batch of R requests, whose tokens lie one after another in T rows."""

    token_ids_T: Ints
    positions_T: Ints
    """The position of each token in its request, consecutive within a request."""
    query_starts: Ints
    """R + 1 offsets into T: request r computes the rows [query_starts[r], query_starts[r + 1])."""
    context_lens: Ints
    """R; keys and values of each request, those of this step included."""
    block_table_RP: npt.NDArray[np.int32]
    """The blocks of each request in order, padded with any valid block number; contiguous."""
    slot_mapping_T: Ints
    """Block number * block_size + offset: where each token's key and value go."""
