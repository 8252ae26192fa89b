"""min_p, top_k and top_p: which tokens may be sampled."""

from torch import Tensor

from octavo.kernels.dispatch import choose, when_called
from octavo.kernels.filter_logits import cpu

_IMPLEMENTATIONS = {
    "cpu": cpu.filter_logits,
    "cuda": when_called("octavo.kernels.filter_logits.gpu", cpu.filter_logits),
}


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the int64 ids, rising, of the tokens that all three filters keep: at least one, unless logits are NaN.

    The filters work one after another on one row of logits, already divided by the temperature:

    1. `min_p` keeps tokens whose probability is at least `min_p` times the largest probability.
    2. `top_k` keeps the `top_k` most likely; 0 keeps all. Equal ones are kept by rising id.
    3. `top_p` renormalises what is left and keeps the shortest list, by falling probability and
       rising id, whose probabilities add up to at least `top_p` (Holtzman et al. 2020).
    """
    return choose("filter_logits", _IMPLEMENTATIONS, logits_V.device)(logits_V, top_k=top_k, top_p=top_p, min_p=min_p)
