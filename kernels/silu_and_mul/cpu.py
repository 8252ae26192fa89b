"""`silu_and_mul` on the CPU through torch.

Not `torch.nn.functional.silu`: it uses another exponential for the elements at the end of a thread's
share than for those in its vectors, so a value's bits would depend on its position. `torch.exp` uses
one exponential for all of a contiguous tensor, and sums and quotients round the same way everywhere.
"""

from torch import Tensor


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """See `octavo.kernels.silu_and_mul.silu_and_mul`."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    gate32_TF = gate_TF.float().contiguous()
    silu_TF = gate32_TF / gate32_TF.neg().exp_().add_(1.0)
    return silu_TF.to(gate_up_T2F.dtype) * up_TF
