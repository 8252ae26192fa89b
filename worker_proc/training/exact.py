"""Logprobs with the values of an engine and the gradients of torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from octavo.worker_proc.training.sampler_forward import SamplerForward


class _WithValues(torch.autograd.Function):
    """Replaces the values of a tensor; gradients pass through unchanged."""

    @staticmethod
    def forward(ctx: FunctionCtx, computed: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Any) -> tuple[Any, None]:
        return grads[0], None


def exact_logprobs(model: nn.Module, forward: SamplerForward, token_ids: Sequence[int]) -> Tensor:
    """Return the logprob of each token but the first, float32, as the engine computes it with these weights.

    The values come from the engine's kernels, so the divergence between the trainer and a sampler with the same weights
    is exactly 0. The gradients are torch's: both compute the same function, rounded differently.

    Args:
        model: model of transformers whose weights `forward` loaded last.
        forward: `Forward` of the engine.
        token_ids: a prompt and its output.

    Raises:
        ValueError: there are fewer than two tokens, or more than the engine takes.
    """
    values = forward.logprobs(token_ids)
    ids = torch.tensor(token_ids)
    logits = model(ids[None, :-1]).logits[0].float()
    computed = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return _WithValues.apply(computed, values)  # type: ignore[no-untyped-call, no-any-return]
