"""A token mask on a GPU, element by element."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.token_mask.bits import FORBIDDEN

_BLOCK = 1024


def mask_tokens(logits_V: Tensor, allowed_W: Tensor) -> None:
    """See the contract in the package."""
    count = logits_V.numel()
    _mask_tokens_kernel[(triton.cdiv(count, _BLOCK),)](logits_V, allowed_W, count, FORBIDDEN=FORBIDDEN, BLOCK=_BLOCK)


@triton.jit
def is_allowed(mask_ptr, ids, is_in):
    """Return the bits of some tokens in a mask."""
    words = tl.load(mask_ptr + ids // 32, mask=is_in, other=0)
    return ((words >> (ids % 32)) & 1) != 0


@triton.jit
def _mask_tokens_kernel(logits_ptr, allowed_ptr, count, FORBIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = ids < count
    forbidden = tl.full((BLOCK,), FORBIDDEN, tl.float32)
    tl.store(logits_ptr + ids, forbidden, mask=is_in & (is_allowed(allowed_ptr, ids, is_in) == 0))
