"""The tensors of one forward pass, as the model and the attention see them.

Holds no request: who owns a row, and what is sampled from it, is the persistent batch's business.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A ragged batch of R requests, whose tokens lie one after another in T rows."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64; the position of each token in its request, consecutive within a request."""
    query_starts: list[int]
    """R + 1 offsets into T: request r computes the rows [query_starts[r], query_starts[r + 1])."""
    context_lens: list[int]
    """R; keys and values of each request, those of this step included."""
    block_table_RP: Tensor
    """int32; the blocks of each request in order, padded with any valid block number."""
    slot_mapping_T: Tensor
    """int64; block number * block_size + offset: where each token's key and value go."""
