"""Initializes torch's vectorized functions once, before any operation runs. Computes nothing that is used."""

import torch

_VECTOR_MATH = ("cos", "erf", "exp", "log", "sin", "tanh")


def prepare_vector_math() -> None:
    """Call every function of MKL's vector math once, on one thread.

    MKL chooses its routine in the first call of each function. When that call is made by several threads
    at once, some of them may compute with a routine of low accuracy: seen as an `exp` wrong by 1e-4 in one
    start of a few hundred. One element is too little for torch to use threads.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in _VECTOR_MATH:
            getattr(torch, name)(one)
