"""One step: from a plan to its result, over whatever model and cache the worker has.

Decides nothing and sends nothing; the command loop in `worker` does the talking.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.steps import NO_TOKEN, Scheduled, SlotMask, StepPlan, StepResult
from octavo.worker_proc.batch.outputs import step_result, token_logprobs
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.pages import PagesAhead
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.sampling.sampler import Draw, Sampler, as_logits
from octavo.worker_proc.step.forward import Forward, build_forward

PROMPT_LOGPROBS_ROWS = 64
"""Prompt positions whose logits are held at a time: a chunk's worth of a large vocabulary would not be small."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of the forward pass that belong to one scheduled entry."""

    entry: Scheduled
    row: Row
    first: int
    """Its first row in the step."""

    @property
    def end_position(self) -> int:
        return self.entry.start + self.entry.num_tokens


class StepExecutor:
    """Applies plans to the batch and runs the model over what they schedule."""

    def __init__(self, forward: Forward, state: BatchState, sampler: Sampler, pages: PagesAhead) -> None:
        self.forward = forward
        self.pages = pages
        self._state = state
        self._sampler = sampler

    @classmethod
    def build(cls, model: Model, config: ResolvedConfig, *, num_blocks: int, max_model_len: int) -> "StepExecutor":
        """Make the cache and an empty batch for a loaded model.

        Args:
            model: shared, not copied.
            config: block size, dtype and number of slots.
            num_blocks: of the cache.
            max_model_len: longest request, in tokens.
        """
        forward = build_forward(
            model, config, num_blocks=num_blocks, max_model_len=max_model_len, max_logits=PROMPT_LOGPROBS_ROWS
        )
        state = BatchState(
            num_slots=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
            vocab_size=config.model.vocab_size,
        )
        sampler = Sampler(config.model.vocab_size, model.library, config.num_threads, forward.choose_threads)
        return cls(forward, state, sampler, PagesAhead(forward.cache_buffers, num_blocks))

    @torch.inference_mode()
    def execute(self, plan: StepPlan, take_masks: Callable[[], Sequence[SlotMask]] = tuple) -> StepResult:
        """Return what a plan's step produced.

        Args:
            plan: the step.
            take_masks: waits for the step's masks and returns them. Called once the model is computed, if the plan
                says that there are any.

        Raises:
            ProtocolError: the plan or the masks do not fit the batch.
        """
        start_s = time.perf_counter()
        self._state.apply(plan)
        self.pages.note(plan)
        if not plan.scheduled:
            return step_result(plan.sequence, [], [], [], time.perf_counter() - start_s)
        spans = self._compute(plan.scheduled)
        prompt_logprobs = [(span.row.slot, entries) for span in spans if (entries := list(self._prompt_logprobs(span)))]
        if plan.awaits_masks:
            self._state.mask(take_masks())
        sampled, token_entries = self._sample([span for span in spans if span.entry.samples])
        return step_result(plan.sequence, sampled, token_entries, prompt_logprobs, time.perf_counter() - start_s)

    def _compute(self, scheduled: Sequence[Scheduled]) -> list[_Span]:
        inputs = self._state.inputs_of(scheduled)
        self.forward.run(inputs)
        return [
            _Span(entry, self._state.rows[entry.slot], first)
            for entry, first in zip(scheduled, inputs.query_starts.tolist(), strict=False)
        ]

    def _sample(self, spans: Sequence[_Span]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Sample the successor of each span's last token and put it into its row."""
        if not spans:
            return [], []
        logits_RV = self.forward.logits(np.array([span.first + span.entry.num_tokens - 1 for span in spans]))
        draws = [
            Draw(span.row.sampling, span.end_position, span.end_position - span.row.num_prompt_tokens) for span in spans
        ]
        sampled = self._sampler.sample(logits_RV, draws)
        entries = self._token_logprobs(logits_RV, draws, sampled)
        for span, token_id in zip(spans, sampled, strict=True):
            # A request without a token has failed, but the next step is planned already and computes something for it.
            self._state.record(span.row, span.end_position, max(token_id, 0))
        return sampled, entries

    def _token_logprobs(
        self, logits_RV: Tensor, draws: Sequence[Draw], sampled: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Return an entry per draw; None where none was asked for, or there is no token."""
        rows = [
            index
            for index, draw in enumerate(draws)
            if draw.state.spec.logprobs is not None and sampled[index] != NO_TOKEN
        ]
        entries: list[TokenLogprobs | None] = [None] * len(draws)
        if rows:
            token_ids = [sampled[index] for index in rows]
            logits = logits_RV if len(rows) == len(draws) else logits_RV[rows]
            found = self._sampler.report(logits, [draws[index] for index in rows], token_ids)
            for index, token_id, row in zip(rows, token_ids, found, strict=True):
                entries[index] = token_logprobs(token_id, row)
        return entries

    def _prompt_logprobs(self, span: _Span) -> Iterator[TokenLogprobs]:
        """Yield the logprobs of the prompt tokens that follow this span's positions, if asked for."""
        num_top = span.row.sampling.spec.prompt_logprobs
        if num_top is None:
            return
        end = min(span.end_position + 1, span.row.num_prompt_tokens)
        token_ids = self._state.token_ids(span.row, span.entry.start + 1, end)
        has_logits = span.row.sampling.spec.logprobs_mode.endswith("logits")
        for offset in range(0, len(token_ids), PROMPT_LOGPROBS_ROWS):
            targets = token_ids[offset : offset + PROMPT_LOGPROBS_ROWS]
            first = span.first + offset
            logits_RV = self.forward.logits(np.arange(first, first + len(targets)))
            found = self._sampler.logprobs(logits_RV, targets, [num_top] * len(targets))
            for token_id, row, logits_V in zip(targets, found, logits_RV, strict=True):
                yield token_logprobs(token_id, as_logits(row, logits_V, token_id) if has_logits else row)
