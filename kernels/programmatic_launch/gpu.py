"""The beginning of Triton kernels that may be launched before the kernel ahead of them ends.

See the package.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel begin, and wait for the results of all kernels before. Nothing is read or written earlier."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask the second-level cache for the lines at these addresses. No value is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
