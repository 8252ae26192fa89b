"""The bits taken apart by numpy, and one torch operation over the row."""

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.token_mask.bits import FORBIDDEN


def mask_tokens(logits_V: Tensor, allowed_W: Tensor) -> None:
    """See the contract in the package."""
    bits = np.unpackbits(allowed_W.numpy().view(np.uint8), count=logits_V.numel(), bitorder="little")
    logits_V.masked_fill_(torch.from_numpy(bits) == 0, FORBIDDEN)
