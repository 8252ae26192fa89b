"""Reference of `gumbel_sample`: noise for every candidate, one after another."""

from torch import Tensor

from octavo.kernels.gumbel_sample.noise import gumbel, step_keys, uniform


def gumbel_sample(logits_C: Tensor, token_ids_C: Tensor, *, seed: int, position: int) -> int:
    """See the contract in the package."""
    keys = step_keys(seed, position)
    ids: list[int] = token_ids_C.tolist()
    scores = [logit + gumbel(uniform(keys, token)) for logit, token in zip(logits_C.tolist(), ids, strict=True)]
    return ids[scores.index(max(scores))]
