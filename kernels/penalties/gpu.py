"""Penalties on a GPU, for the kernels of `octavo.kernels.sample`; every operation is rounded separately."""

import triton
import triton.language as tl


@triton.jit
def penalized(logits, counts, repetition, frequency, presence):
    """Return the penalized logits of seen tokens. Kernels that call it must be compiled without fused multiply-add."""
    divided = tl.div_rn(logits, repetition + tl.zeros_like(logits))
    logits = tl.where(logits > 0, divided, logits * repetition)
    logits = logits - frequency * counts.to(tl.float32)
    return logits - presence * (counts > 0).to(tl.float32)
