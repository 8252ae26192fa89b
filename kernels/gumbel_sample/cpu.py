"""Hashes all candidates with vector instructions, and computes exact noise only for candidates that can win."""

import torch
from torch import Tensor

from octavo.kernels.gumbel_sample.noise import (
    MURMUR_1,
    MURMUR_2,
    NUM_UNIFORM_BITS,
    gumbel,
    step_keys,
    uniform_of_bits,
)


def gumbel_sample(logits_C: Tensor, token_ids_C: Tensor, *, seed: int, position: int) -> int:
    """See the contract in the package.

    With v = 1 - u the noise -log(-log(1 - v)) is at most -log(v), because -log(1 - v) >= v. So
    `logit - log(v)` is an upper bound of each candidate's score and costs one vector logarithm.
    The exact score of the candidate with the largest bound rules out all candidates with a lower bound;
    the few that remain are scored exactly in float64. `slack` covers the rounding of the bound:
    float32 is off by less than 2^-22 of the largest magnitude involved, which is below |best| + 64.
    """
    keys = step_keys(seed, position)
    bits_C = _hash_bits(token_ids_C, keys)
    bounds_C = logits_C - ((bits_C + 0.5) * 2.0**-NUM_UNIFORM_BITS).log_()
    first = int(bounds_C.argmax())
    winner, best = int(token_ids_C[first]), _score(logits_C, bits_C, first)
    slack = 2.0**-20 * (abs(best) + 64)
    for index in (bounds_C >= best - slack).nonzero().squeeze(1).tolist():
        score, token_id = _score(logits_C, bits_C, index), int(token_ids_C[index])
        if score > best or (score == best and token_id < winner):
            winner, best = token_id, score
    return winner


def _score(logits_C: Tensor, bits_C: Tensor, index: int) -> float:
    return float(logits_C[index]) + gumbel(uniform_of_bits(int(bits_C[index])))


def _hash_bits(token_ids_C: Tensor, keys: tuple[int, int]) -> Tensor:
    """Return the `NUM_UNIFORM_BITS` upper bits of each token's hash, as int32."""
    words_C = token_ids_C.to(torch.int32)
    for key in keys:
        words_C = words_C ^ _signed(key)
        words_C ^= _shift_right(words_C, 16)
        words_C *= _signed(MURMUR_1)
        words_C ^= _shift_right(words_C, 13)
        words_C *= _signed(MURMUR_2)
        words_C ^= _shift_right(words_C, 16)
    return _shift_right(words_C, 32 - NUM_UNIFORM_BITS)


def _shift_right(words_C: Tensor, num_bits: int) -> Tensor:
    """Shift right and fill with zeros. Torch's shift of a signed integer would repeat the sign bit."""
    return (words_C >> num_bits).bitwise_and_((1 << (32 - num_bits)) - 1)


def _signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned 32-bit word."""
    return word - 2**32 if word >= 2**31 else word
