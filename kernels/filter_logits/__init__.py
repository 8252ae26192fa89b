"""min_p, top_k and top_p: filters that decide which tokens may be sampled."""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.filter_logits import cpu

_IMPLEMENTATIONS = {"cpu": cpu.filter_logits}
"""Implementations by device type. On a GPU, `octavo.kernels.sample.sample_rows` does this for complete rows."""


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the int64 ids, ascending, of the tokens that all three filters keep: at least one, unless logits are NaN.

    The filters are applied in this order to one row of logits that was divided by the temperature:

    1. `min_p` keeps tokens whose probability is at least `min_p` times the largest probability.
    2. `top_k` keeps the `top_k` most likely tokens; 0 keeps all. In ties, lower ids are kept.
    3. `top_p` renormalizes the rest and keeps the shortest list, by descending probability and
       ascending id, whose probabilities add up to at least `top_p` (Holtzman et al. 2020).
    """
    return choose("filter_logits", _IMPLEMENTATIONS, logits_V.device)(logits_V, top_k=top_k, top_p=top_p, min_p=min_p)
