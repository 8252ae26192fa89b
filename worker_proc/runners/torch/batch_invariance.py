"""Checks whether the rows of a model depend on their batch: runs a few steps with its weights and compares bits."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from msgspec.structs import replace
from torch import Tensor, nn

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.batch.inputs import GroupInputs, StepInputs
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.fallback.model import TransformersModel
from octavo.worker_proc.models.fallback.weights import WeightUseError
from octavo.worker_proc.runners.torch.forward import TorchForward
from octavo.worker_proc.runners.torch.open import open_attention

logger = logging.getLogger(__name__)

LENGTHS = (29, 5, 18, 1)
"""Numbers of tokens of the requests. The first request is compared."""
MAX_RELATIVE_DIFFERENCE = 0.1
"""Rounding changes rows by less. If rows differ by more, other rows take part in their sums."""

Part = tuple[int, int, int]
"""A request, and its positions [start, end) that a step computes."""


@torch.inference_mode()
def check_batch_invariance(model: Model, config: ResolvedConfig) -> str:
    """Return the first module of a `TransformersModel` whose rows have other bits in other steps; "" if all are equal.

    Args:
        model: model with loaded weights.
        config: configuration of its cache.

    Raises:
        ConfigError: rows depend on other requests by more than rounding, or positions have another meaning.
    """
    assert isinstance(model, TransformersModel), "models of families are batch-invariant"
    runner = _StepRunner(model, config)
    whole = runner.run(((0, 0, LENGTHS[0]),))
    if not all(map(torch.equal, whole, runner.run_with_own_positions())):
        raise _refusal(model, "positions that it counts by itself give other logits than positions from 0")
    steps: list[Sequence[Part]] = [
        ((1, 0, 5), (2, 0, 18), (0, 0, 11), (3, 0, 1)),
        ((0, 11, 12),),
        ((2, 17, 18), (0, 12, LENGTHS[0]), (1, 4, 5)),
    ]
    for step in steps:
        ((_, start, end),) = (part for part in step if part[0] == 0)
        for expected, actual in zip(whole, runner.run(step), strict=True):
            if torch.equal(actual, expected[start:end]):
                continue
            difference = (actual - expected[start:end]).abs().max() / expected.abs().max().clamp(min=1e-30)
            name = runner.first_difference(step, start, end)
            if not difference <= MAX_RELATIVE_DIFFERENCE:
                raise _refusal(model, f"{name} mixes the rows of requests")
            logger.warning(
                "the rows of module %s (%s) have other bits in other batches: the tokens of a request may depend on "
                "the rest of its batch; chunks, preemption and cached prefixes may change them too",
                name,
                type(model.module).__name__,
            )
            return name
    logger.info(
        "%s runs through transformers %s; a request has the same bits alone, in chunks and in batches",
        type(model.module).__name__,
        transformers.__version__,
    )
    return ""


def _refusal(model: TransformersModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(model.module).__name__} cannot run through transformers: {reason}",
        hint="see docs/models.md for what the fallback needs of a model",
    )


class _StepRunner:
    def __init__(self, model: TransformersModel, config: ResolvedConfig) -> None:
        self.model = model
        self._block_size = config.block_size
        self._blocks_each = -(-max(LENGTHS) // config.block_size)
        """Number of blocks of each request in each cache group."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.tensor([token for token in range(config.model.vocab_size) if token not in model.padding_ids])
        self._tokens = [tokens[torch.randint(len(tokens), (length,), generator=generator)] for length in LENGTHS]
        num_blocks = len(model.cache_groups) * len(LENGTHS) * self._blocks_each
        small = replace(config, max_num_batched_tokens=sum(LENGTHS))
        attention = open_attention(model, small, num_blocks=num_blocks, num_states=0, max_model_len=max(LENGTHS))
        self.forward = TorchForward(model, attention, max(LENGTHS))

    def run(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Compute a step. Return the hidden states and the logits of the first request."""
        first = self._first_row(parts)
        ((start, end),) = ((start, end) for request, start, end in parts if request == 0)
        outputs: list[Tensor] = []
        base = self.model.base
        handle = base.register_forward_hook(lambda _, __, out: outputs.append(out.last_hidden_state[0]))
        try:
            self.forward.run(self._inputs(parts))
        except WeightUseError as error:
            raise _refusal(self.model, str(error)) from error
        finally:
            handle.remove()
        rows = np.arange(first, first + end - start)
        return outputs[0][first : first + end - start].float(), self.forward.logits(rows).clone()

    def run_with_own_positions(self) -> tuple[Tensor, Tensor]:
        """Compute the complete first request without passing positions to the model."""
        self.model.counts_positions = True
        try:
            return self.run(((0, 0, LENGTHS[0]),))
        finally:
            self.model.counts_positions = False

    def first_difference(self, step: Sequence[Part], start: int, end: int) -> str:
        """Return the first module whose rows in a step differ from those of the undivided request, whose keys are
        cached."""
        expected = self._record(((0, 0, LENGTHS[0]),))
        actual = self._record(step)
        names = {name.removesuffix(" input") for name in expected}
        for name, rows in actual.items():
            if name not in expected or torch.equal(rows, expected[name][start:end]) or name.endswith(" input"):
                continue
            given, before = actual.get(f"{name} input"), expected.get(f"{name} input")
            is_own = given is None or before is None or torch.equal(given, before[start:end])
            parent = name.rpartition(".")[0]
            return name if is_own or parent not in names else parent
        return type(self.model.module).__name__

    def _record(self, parts: Sequence[Part]) -> dict[str, Tensor]:
        """Return the inputs and outputs of each module for the rows of the first request, in order."""
        first = self._first_row(parts)
        found: dict[str, Tensor] = {}
        ((start, end),) = ((start, end) for request, start, end in parts if request == 0)

        def keep(name: str, value: Any) -> None:
            rows = value[0] if isinstance(value, tuple | list) and value else value
            if isinstance(rows, Tensor) and rows.ndim > 1:
                rows = rows[0] if len(rows) == 1 else rows
                if len(rows) == self.model.step.num_padded_rows:
                    found.setdefault(name, rows[first : first + end - start].clone())

        def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            keep(f"{name} input", inputs)
            keep(name, output)

        handles = [
            module.register_forward_hook(partial(hook, name)) for name, module in self.model.module.named_modules()
        ]
        try:
            self.forward.run(self._inputs(parts))
        finally:
            for handle in handles:
                handle.remove()
        return found

    @staticmethod
    def _first_row(parts: Sequence[Part]) -> int:
        row = 0
        for request, start, end in parts:
            if request == 0:
                return row
            row += end - start
        raise AssertionError("a step without the first request")

    def _inputs(self, parts: Sequence[Part]) -> StepInputs:
        counts = [end - start for _, start, end in parts]
        each, block_size, num_groups = self._blocks_each, self._block_size, len(self.model.cache_groups)

        def group(index: int) -> GroupInputs:
            tables = {
                request: np.arange(each, dtype=np.int32) + (index * len(LENGTHS) + request) * each
                for request, _, _ in parts
            }
            slots = [
                tables[request][np.arange(start, end) // block_size].astype(np.int64) * block_size
                + np.arange(start, end) % block_size
                for request, start, end in parts
            ]
            return GroupInputs(np.concatenate(slots), np.stack([tables[request] for request, _, _ in parts]))

        return StepInputs(
            np.concatenate([self._tokens[request][start:end].numpy() for request, start, end in parts]),
            np.concatenate([np.arange(start, end) for _, start, end in parts]),
            np.array([0, *counts]).cumsum(),
            np.array([end for _, _, end in parts]),
            np.repeat([request for request, _, _ in parts], counts),
            tuple(group(index) for index in range(num_groups)),
        )
