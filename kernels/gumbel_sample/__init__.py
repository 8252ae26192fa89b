"""Sampling from a softmax by the Gumbel-max trick, with stateless noise.

The largest of `logit + noise` is a draw from the softmax of the logits when the noise is
-log(-log(u)) with independent uniform u (Gumbel 1954). Here u is a hash of (seed, position, token id),
see `noise`. So the draw is the same in any batch, in any row and after any restart.
"""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.gumbel_sample import cpu

_IMPLEMENTATIONS = {"cpu": cpu.gumbel_sample}
"""Implementations by device type. On a GPU, `octavo.kernels.sample.sample_rows` draws from complete rows instead."""


def gumbel_sample(logits_C: Tensor, token_ids_C: Tensor, *, seed: int, position: int) -> int:
    """Return the candidate with the largest sum of logit and noise; the lowest id wins ties.

    Args:
        logits_C: float32 logits of the candidates; -inf is never drawn.
        token_ids_C: int64, ascending.
        seed: unsigned 64-bit.
        position: number of tokens before the drawn token.
    """
    return choose("gumbel_sample", _IMPLEMENTATIONS, logits_C.device)(
        logits_C, token_ids_C, seed=seed, position=position
    )
