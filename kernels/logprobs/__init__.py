"""Log-probabilities of a token and of the most likely tokens, or of given ones, beside it."""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy
from octavo.kernels.logprobs import cpu
from octavo.kernels.logprobs.row import RowLogprobs as RowLogprobs

_IMPLEMENTATIONS = {"cpu": cpu.logprobs, "cuda": lazy("octavo.kernels.logprobs.gpu", cpu.logprobs)}


def logprobs_of_rows(
    logits_RV: Tensor, token_ids_R: Tensor, top: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `logprobs` does, for every row and on a GPU alone, without waiting for it.

    Args:
        logits_RV: float32; the logits of a row lie side by side.
        token_ids_R: int64, a token of the vocabulary for each row.
        top: how many of the most likely tokens, K; more than there are means all. Or int64 token ids of shape (R, K).

    Returns:
        token_logprob_R float32, rank_R int32 from 1, top_token_ids_RK int64 and top_logprobs_RK float32.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    implementations = {"cuda": lazy("octavo.kernels.logprobs.gpu", logprobs_of_rows)}
    return choose("logprobs_of_rows", implementations, logits_RV.device)(logits_RV, token_ids_R, top)


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
