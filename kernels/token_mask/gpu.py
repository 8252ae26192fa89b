"""Token masks on a GPU, for the kernels of `octavo.kernels.sample`."""

import triton
import triton.language as tl


@triton.jit
def is_allowed(mask_ptr, ids, is_in):
    """Return the bits of some tokens in a mask."""
    words = tl.load(mask_ptr + ids // 32, mask=is_in, other=0)
    return ((words >> (ids % 32)) & 1) != 0
