"""Initializes MKL's vector math once, before any operation runs. The results are discarded."""

import torch

_VECTOR_MATH = ("cos", "erf", "exp", "log", "sin", "tanh")


def prepare_vector_math() -> None:
    """Call every function of MKL's vector math once, on one thread.

    MKL chooses the routine of each function in its first call. If several threads make that call at once, some of them
    may compute with a low-accuracy routine: we saw an `exp` that was wrong by 1e-4, in one start out of a few hundred.
    One element is too few for torch to use several threads.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in _VECTOR_MATH:
            getattr(torch, name)(one)
