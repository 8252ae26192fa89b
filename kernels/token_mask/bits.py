"""The form of a token mask, and the logit of what it rules out."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

FORBIDDEN = -1e32
"""Below any other logit that is drawn from, and finite at the lowest temperature, 0.01: infinite ones have differences
that are no numbers."""


def pack_mask(allowed: Iterable[int], vocab_size: int) -> Tensor:
    """Return the mask that allows these tokens alone, each less than `vocab_size`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[np.fromiter(allowed, dtype=np.int64)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))
