"""What draws of many requests need to know of them, as columns on a GPU. Draws nothing."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RequestTable:
    """One row for each slot of a batch; its owner fills the rows, and the tensors stay where they are.

    So a captured graph may read them. Of a list of ids only the first so many count; no id stands in one list twice.
    """

    temperature_S: Tensor
    """float32; 0: the most likely token."""
    seed_S: Tensor
    """int64, the bits of the unsigned seed."""
    top_k_S: Tensor
    """int32; 0 keeps all."""
    top_p_S: Tensor
    """float64; 1 keeps all."""
    log_min_p_S: Tensor
    """float32, a logarithm; minus infinity keeps all."""
    bias_ids_SB: Tensor
    """int32."""
    bias_values_SB: Tensor
    """float32."""
    num_biases_S: Tensor
    """int32, as all numbers of entries."""
    withheld_ids_SE: Tensor
    """int32: what may not be drawn before `min_tokens` outputs."""
    num_withheld_S: Tensor
    min_tokens_S: Tensor
    """int32."""
    bad_ids_SX: Tensor
    """int32: what would complete a bad word."""
    num_bad_S: Tensor
    has_penalties_S: Tensor
    """int32, 0 or 1."""
    seen_ids_SL: Tensor
    """int32: the tokens of prompt and output."""
    output_counts_SL: Tensor
    """int32: how often each was output."""
    num_seen_S: Tensor
    penalties_S3: Tensor
    """float32: repetition, frequency, presence."""
    has_mask_S: Tensor
    """int32, 0 or 1."""
    allowed_SW: Tensor
    """int32: a token mask, see `octavo.kernels.token_mask`."""

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        vocab_size: int,
        *,
        max_biases: int,
        max_withheld: int,
        max_bad: int,
        max_seen: int,
        device: torch.device,
    ) -> Self:
        """Return a table of requests that take the most likely token and change no logits."""

        def zeros(*width: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_slots, *width, dtype=dtype, device=device)

        return cls(
            temperature_S=zeros(dtype=torch.float32),
            seed_S=zeros(dtype=torch.int64),
            top_k_S=zeros(),
            top_p_S=zeros(dtype=torch.float64) + 1.0,
            log_min_p_S=zeros(dtype=torch.float32) - torch.inf,
            bias_ids_SB=zeros(max_biases),
            bias_values_SB=zeros(max_biases, dtype=torch.float32),
            num_biases_S=zeros(),
            withheld_ids_SE=zeros(max_withheld),
            num_withheld_S=zeros(),
            min_tokens_S=zeros(),
            bad_ids_SX=zeros(max_bad),
            num_bad_S=zeros(),
            has_penalties_S=zeros(),
            seen_ids_SL=zeros(max_seen),
            output_counts_SL=zeros(max_seen),
            num_seen_S=zeros(),
            penalties_S3=zeros(3, dtype=torch.float32),
            has_mask_S=zeros(),
            allowed_SW=zeros(-(-vocab_size // 32)),
        )
