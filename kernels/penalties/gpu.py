"""Penalties on a GPU, element by element over the seen tokens; every operation is rounded separately."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


def apply_penalties(
    logits_V: Tensor,
    seen_ids_S: Tensor,
    output_counts_S: Tensor,
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """See the contract in the package."""
    num_seen = seen_ids_S.numel()
    if num_seen:
        _apply_penalties_kernel[(triton.cdiv(num_seen, _BLOCK),)](
            logits_V,
            seen_ids_S,
            output_counts_S,
            num_seen,
            repetition,
            frequency,
            presence,
            BLOCK=_BLOCK,
            # A fused multiply-subtract would round only once.
            enable_fp_fusion=False,
        )


@triton.jit
def penalized(logits, counts, repetition, frequency, presence):
    """Return the penalized logits of seen tokens. Kernels that call it must be compiled without fused multiply-add."""
    divided = tl.div_rn(logits, repetition + tl.zeros_like(logits))
    logits = tl.where(logits > 0, divided, logits * repetition)
    logits = logits - frequency * counts.to(tl.float32)
    return logits - presence * (counts > 0).to(tl.float32)


@triton.jit
def _apply_penalties_kernel(
    logits_ptr, seen_ptr, counts_ptr, num_seen, repetition, frequency, presence, BLOCK: tl.constexpr
):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = entries < num_seen
    ids = tl.load(seen_ptr + entries, mask=is_in, other=0)
    counts = tl.load(counts_ptr + entries, mask=is_in, other=0)
    logits = tl.load(logits_ptr + ids, mask=is_in, other=0.0)
    tl.store(logits_ptr + ids, penalized(logits, counts, repetition, frequency, presence), mask=is_in)
