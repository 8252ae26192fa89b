"""Log-probabilities of a token and of the most likely tokens beside it."""

from torch import Tensor

from octavo.kernels.dispatch import choose, when_called
from octavo.kernels.logprobs import cpu
from octavo.kernels.logprobs.row import RowLogprobs as RowLogprobs

_IMPLEMENTATIONS = {"cpu": cpu.logprobs, "cuda": when_called("octavo.kernels.logprobs.gpu", cpu.logprobs)}


def logprobs(logits_V: Tensor, token_id: int, num_top: int) -> RowLogprobs:
    """Return the log-softmax of one row of float32 logits at `token_id` and at its largest values.

    The `num_top` largest are ordered by falling logprob, equal ones by rising token id. The rank of
    the token is its place in this order, from 1, over the whole vocabulary.
    """
    return choose("logprobs", _IMPLEMENTATIONS, logits_V.device)(logits_V, token_id, num_top)
