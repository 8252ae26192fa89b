"""Logprobs of a small model at all positions of one prompt, and the difference between two models."""

import torch
from tiny_models import VOCAB_SIZE
from worker_plans import alone, loaded, spec

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.models.base import Model

PROMPT = [5, 6, 7, 8, 200, 17, 300, 44, 9, 101, 33, 250]


def kinds(model: Model) -> set[str]:
    """Return the kinds of the packed weights."""
    return {packed.product.packed.kind for packed in model.parameters.packed.values()}


def logprobs(config: ResolvedConfig, *, is_native: bool = True, model: Model | None = None) -> torch.Tensor:
    """Return the logprobs of all tokens at all positions of the prompt except the last."""
    model = model or loaded(config, is_native=is_native)
    entries = alone(model, config, PROMPT, spec(prompt_logprobs=VOCAB_SIZE), 1).prompt_logprobs
    rows = torch.zeros(len(entries), VOCAB_SIZE)
    for row, entry in zip(rows, entries, strict=True):
        row[entry.token_ids] = torch.tensor(entry.logprobs)
    assert (rows < 0).all()
    return rows


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the RMS difference of two results, relative to the standard deviation of the second."""
    return float((first - second).pow(2).mean().sqrt() / second.std(dim=1).mean())
