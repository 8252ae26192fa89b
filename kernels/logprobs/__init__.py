"""Log-probabilities of a token and of the most likely tokens, or of given ones, beside it."""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.dispatch import choose, when_called
from octavo.kernels.logprobs import cpu
from octavo.kernels.logprobs.row import RowLogprobs as RowLogprobs

_IMPLEMENTATIONS = {"cpu": cpu.logprobs, "cuda": when_called("octavo.kernels.logprobs.gpu", cpu.logprobs)}


def logprobs(logits_V: Tensor, token_id: int, top: int | Sequence[int]) -> RowLogprobs:
    """Return the log-softmax of one row of float32 logits at `token_id` and at its largest values.

    The largest are ordered by falling logprob, equal ones by rising token id. The rank of the token is its
    place in this order, from 1, over the whole vocabulary.

    Args:
        logits_V: of the vocabulary.
        token_id: of the token.
        top: how many of the largest, or the token ids to take in their place, in their order. A token has the same
            bits either way.
    """
    return choose("logprobs", _IMPLEMENTATIONS, logits_V.device)(logits_V, token_id, top)
