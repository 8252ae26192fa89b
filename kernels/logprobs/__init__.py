"""Log-probabilities of a token, and of the most likely tokens or of requested tokens."""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy
from octavo.kernels.logprobs import cpu
from octavo.kernels.logprobs.row import RowLogprobs as RowLogprobs

_IMPLEMENTATIONS = {"cpu": cpu.logprobs}
"""Implementations by device type. On a GPU, `logprobs_of_rows` computes many rows at once."""


def logprobs_of_rows(
    logits_RV: Tensor, token_ids_R: Tensor, top: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `logprobs` for every row. Only on a GPU; does not synchronize with it.

    Args:
        logits_RV: float32; rows are contiguous.
        token_ids_R: int64, one token of the vocabulary for each row.
        top: K, the number of most likely tokens, at most V; or the requested token ids, int64, shape (R, K).

    Returns:
        token_logprob_R float32, rank_R int32 from 1, top_token_ids_RK int64 and top_logprobs_RK float32.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    implementations = {"cuda": lazy("octavo.kernels.logprobs.gpu", logprobs_of_rows)}
    return choose("logprobs_of_rows", implementations, logits_RV.device)(logits_RV, token_ids_R, top)


def logprobs(logits_V: Tensor, token_id: int, top: int | Sequence[int]) -> RowLogprobs:
    """Return the log-softmax of one row of float32 logits at `token_id` and at its largest values.

    Tokens are ordered by descending logprob, ties by ascending token id. The rank of the token is its place in this
    order, from 1, over the whole vocabulary.

    Args:
        logits_V: logits of the vocabulary.
        token_id: token whose logprob and rank are returned.
        top: the number of largest values, or the token ids to report instead, in their order. The bits of a token's
            logprob are the same either way.
    """
    return choose("logprobs", _IMPLEMENTATIONS, logits_V.device)(logits_V, token_id, top)
