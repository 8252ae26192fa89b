"""Speculative decoding: draws that depend on earlier tokens, made one after another.

Penalties, bad words of several tokens and logits processors depend on all tokens before a draw, and some runners have
only one mask per request. A draft becomes a token of its request only if it is right. So each round makes the draws
whose drafts were all right, with the same state as in a step of their own. Nothing has to be rolled back.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.worker_proc.batch.columns import Trait
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.executor.runner import Samples


class DrawRounds:
    """See `octavo.worker_proc.executor.runner.Rounds`.

    Args:
        samples: samples of the step; their requests have all masks of the step.
        batch: batch of these requests.
        is_dependent_N: whether each sample's request must know its earlier tokens. All other samples are drawn in the
            first round.
    """

    def __init__(self, samples: Samples, batch: BatchState, is_dependent_N: npt.NDArray[np.bool_]) -> None:
        assert samples.draft_tokens is not None, "draws without drafts are independent"
        self._samples, self._draft_tokens, self._batch = samples, samples.draft_tokens, batch
        self.is_dependent_N = is_dependent_N
        self.places_M: Ints = (~is_dependent_N | (self._draft_tokens.offsets_N == 0)).nonzero()[0]

    def record(self, token_ids: Sequence[int]) -> None:
        """See `octavo.worker_proc.executor.runner.Rounds`."""
        samples, tokens_M = self._samples, np.array(token_ids, dtype=np.int64)
        is_followed_M = self.is_dependent_N[self.places_M]
        places_M, tokens_M = self.places_M[is_followed_M], tokens_M[is_followed_M]
        slots_M = samples.slots_N[places_M]
        self._batch.set_tokens(
            slots_M, samples.positions_N[places_M], samples.admissions_N[places_M], np.maximum(tokens_M, 0)
        )
        self.places_M = places_M[tokens_M == self._draft_tokens.token_ids_N[places_M]] + 1
        if len(self.places_M):
            num_draft_tokens = int(self._draft_tokens.offsets_N[self.places_M[0]])
            self._batch.use_later_masks(samples.slots_N[self.places_M], num_draft_tokens)


def draw_rounds(
    samples: Samples, batch: BatchState, max_logits: int, *, has_processors: bool, masks_each_draw: bool
) -> DrawRounds | None:
    """Return the rounds of a step; `None` if all its draws are independent.

    Args:
        samples: samples of the step; their requests have all masks of the step.
        batch: batch of these requests.
        max_logits: maximum rows of logits. If there are more samples, a round has one sample per request.
        has_processors: whether there are logits processors, which follow the tokens of all requests.
        masks_each_draw: whether draws that are made together may have separate masks.
    """
    if (draft_tokens := samples.draft_tokens) is None:
        return None
    is_dependent_N = draft_tokens.counts_N > 1
    if not has_processors and len(samples) <= max_logits:
        dependent = Trait.TRACKS_TOKENS if masks_each_draw else Trait.TRACKS_TOKENS | Trait.IS_MASKED
        is_dependent_N &= (batch.columns.traits_S[samples.slots_N] & int(dependent)) > 0
    return DrawRounds(samples, batch, is_dependent_N) if is_dependent_N.any() else None
