"""Logprobs of what a step draws, and of the prompt tokens it computes; they are read when the step is over."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.logprobs import logprobs_of_rows
from octavo.kernels.sample import processed_logits
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.pipeline.flights import Drawn, DrawsLogprobs, RowsLogprobs
from octavo.worker_proc.pipeline.runner import StepRunner
from octavo.worker_proc.pipeline.slot_table import SlotTable
from octavo.worker_proc.sampling.state import LARGEST
from octavo.worker_proc.step.execute import PROMPT_LOGPROBS_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The draws of a step that report logprobs."""

    draws_A: Tensor
    """int64, their places among all draws of the step."""
    values_AV: Tensor
    """What is reported of: the model's logits, or what a token is drawn from."""
    is_logit_A: Tensor | None
    """Rows of which the value itself is reported; None: there are none."""
    num_top: int
    """The largest number of most likely tokens."""
    named_AL: Tensor | None
    """int64, the tokens that requests name in the place of those, filled up with any; None: none does."""


class Reporter:
    """Computes logprobs of the step that a runner has computed last; nothing waits for the device.

    Args:
        runner: of the steps.
        stream: of the device.
    """

    def __init__(self, runner: StepRunner, stream: Stream) -> None:
        self._runner = runner
        self._stream = stream

    def before_draw(self, drawn: Sequence[Drawn], rows_N: Ints, table: SlotTable) -> Asked | None:
        """Take what will be reported of, before the draws change the counts of their requests; None: nobody asks.

        Args:
            drawn: the draws of the step.
            rows_N: the row of each.
            table: of the slots.
        """
        indices = [index for index, entry in enumerate(drawn) if entry.num_top is not None]
        if not indices:
            return None
        asked = [drawn[index] for index in indices]
        modes = [entry.row.sampling.spec.logprobs_mode for entry in asked]
        values_AV = self._runner.logits_of(self._sent(rows_N[indices]))
        is_processed = [mode.startswith("processed") for mode in modes]
        if any(is_processed):
            slots = np.array([entry.row.slot for entry in asked])
            num_outputs = np.array([entry.position - entry.row.num_prompt_tokens for entry in asked])
            processed_AV = processed_logits(
                values_AV, table.requests, self._sent(slots), self._sent(num_outputs), largest=LARGEST
            )
            values_AV = torch.where(self._sent(np.array(is_processed)).unsqueeze(1), processed_AV, values_AV)
        is_logit = np.array([mode.endswith("logits") for mode in modes])
        num_top = max(entry.num_top or 0 for entry in asked)
        is_logit_A = self._sent(is_logit) if is_logit.any() else None
        return Asked(self._sent(np.array(indices)), values_AV, is_logit_A, num_top, self._named(asked))

    def _named(self, asked: Sequence[Drawn]) -> Tensor | None:
        lists = [entry.row.sampling.spec.logprob_token_ids for entry in asked]
        if not any(lists):
            return None
        named_AL = np.zeros((len(lists), max(map(len, lists))), dtype=np.int64)
        for row, token_ids in zip(named_AL, lists, strict=True):
            row[: len(token_ids)] = token_ids
        return self._sent(named_AL)

    def after_draw(self, asked: Asked, tokens_N: Tensor) -> DrawsLogprobs:
        """Return what the draws report, given the tokens of all of them; anything for a draw without a token."""
        tokens_A = tokens_N.index_select(0, asked.draws_A).clamp(min=0)
        top = self._logprobs(asked.values_AV, tokens_A, asked.num_top, asked.is_logit_A)
        if asked.named_AL is None:
            return DrawsLogprobs(top, None)
        return DrawsLogprobs(top, self._logprobs(asked.values_AV, tokens_A, asked.named_AL, asked.is_logit_A))

    def of_prompt(self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int) -> list[RowsLogprobs]:
        """Return the logprobs of prompt tokens, each after its row, in pieces.

        Args:
            spec: of the request.
            token_ids: consecutive ones.
            first_row: of the step, after which the first of them comes.
        """
        pieces = []
        for offset in range(0, len(token_ids), PROMPT_LOGPROBS_ROWS):
            targets = np.array(token_ids[offset : offset + PROMPT_LOGPROBS_ROWS])
            rows = np.arange(first_row + offset, first_row + offset + len(targets))
            logits_RV = self._runner.logits_of(self._sent(rows))
            is_logit = np.ones(len(targets), dtype=bool) if spec.logprobs_mode.endswith("logits") else None
            is_logit_R = None if is_logit is None else self._sent(is_logit)
            pieces.append(self._logprobs(logits_RV, self._sent(targets), spec.prompt_logprobs or 0, is_logit_R))
        return pieces

    def _logprobs(
        self, values_RV: Tensor, token_ids_R: Tensor, top: int | Tensor, is_logit_R: Tensor | None
    ) -> RowsLogprobs:
        chosen_R, rank_R, top_ids_RK, top_RK = logprobs_of_rows(values_RV, token_ids_R, top)
        if is_logit_R is not None:
            own_R = values_RV.gather(1, token_ids_R.unsqueeze(1)).squeeze(1)
            chosen_R = torch.where(is_logit_R, own_R, chosen_R)
            top_RK = torch.where(is_logit_R.unsqueeze(1), values_RV.gather(1, top_ids_RK), top_RK)
        return RowsLogprobs(*map(self._stream.download, (chosen_R, rank_R, top_ids_RK, top_RK)))

    def _sent(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Return an array on the device."""
        values = torch.from_numpy(array)
        buffer_B = self._stream.host_buffer(values.nbytes)
        staged = buffer_B.view(values.dtype).view(values.shape)
        staged.copy_(values)
        target = torch.empty_like(values, device=self._stream.torch_device)
        self._stream.upload(target, staged)
        return target
