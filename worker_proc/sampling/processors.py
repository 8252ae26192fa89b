"""Runs logits processors, which are user code, between the model's logits and the sampler.

Keeps the processors' batch up to date, and finds requests for which a processor raises. Loads no processors.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.protocol.logits_processor import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
)
from octavo.protocol.params import SamplingParams, SamplingSpec
from octavo.protocol.sampling_table import ROWS
from octavo.protocol.steps import StepFault
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.state import BatchState

logger = logging.getLogger(__name__)

MAX_FAULT_CHARS = 500
"""Longest text of an exception in an error message."""

_COPIED = [row.name for row in ROWS if row.is_copied]


@dataclass(frozen=True, slots=True)
class ProcessorFactory:
    """Creates a processor."""

    name: str
    make: Callable[[], LogitsProcessor]
    validate: Callable[[SamplingParams], object]
    """Raises ValueError for a request that the processor rejects."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A request in the processors' batch; its index is its row of logits."""

    row: Row
    params: SamplingParams
    prompt: list[int]
    output: list[int]

    @classmethod
    def new(cls, row: Row, batch: BatchState) -> "_Entry":
        tokens = batch.token_ids(row, 0, row.num_known_tokens)
        num_prompt = row.num_prompt_tokens
        return cls(row, caller_params(row.sampling.spec), tokens[:num_prompt], tokens[num_prompt:])

    def added_at(self, index: int) -> AddedRequest:
        return index, self.params, self.prompt, self.output

    def take_output(self, batch: BatchState) -> None:
        """Append the tokens drawn since the last step. Only for a row in the batch: its slot may have a new owner."""
        num_known = len(self.prompt) + len(self.output)
        if num_known < self.row.num_known_tokens:
            self.output.extend(batch.token_ids(self.row, num_known, self.row.num_known_tokens))


class Processors:
    """All processors of an engine, in the order in which they are configured.

    A request joins their batch with its first draw, and again after a preemption, with its outputs so far. When a
    processor raises, the step is repeated with new processors for each single request. Requests for which one raises
    again fail; the others continue with the same tokens as without the fault.
    """

    def __init__(self, factories: Sequence[ProcessorFactory]) -> None:
        self._factories = factories
        self._entries: list[_Entry] = []
        self._failed: dict[int, Row] = {}
        """Requests without further tokens, by the id of their row."""
        self._faults: list[StepFault] = []
        self._processors: list[LogitsProcessor] | None = None
        """`None` if they must be created, and the complete batch added."""

    def admit(self, row: Row) -> None:
        """Have all processors check the parameters of a new request."""
        if row.alignment is not None:
            return
        try:
            params = caller_params(row.sampling.spec)
            for factory in self._factories:
                factory.validate(params)
        except ValueError as error:
            self._fail(row, StepFault(row.slot, f"extra_args: {_text(error)}", "extra_args"))
        except Exception as error:  # user code, which may raise anything
            self._fail(row, StepFault(row.slot, f"a logits processor raised {type(error).__name__}: {_text(error)}"))

    def take_faults(self) -> list[StepFault]:
        """Return the requests that have failed since the last call, with the reasons."""
        faults, self._faults = self._faults, []
        return faults

    def apply(self, logits_RV: Tensor, rows: Sequence[Row], batch: BatchState) -> Tensor:
        """Return the float32 logits for the draws. Rows of failed requests are NaN, from which nothing is drawn.

        Processors do not see alignment requests, whose draws have no meaning.

        Args:
            logits_RV: the model's logits, a row for each draw; not modified.
            rows: request of each draw.
            batch: batch that knows all tokens of these requests.
        """
        self._failed = {key: row for key, row in self._failed.items() if _is_in(row, batch)}
        failed = [place for place, row in enumerate(rows) if id(row) in self._failed]
        places = [place for place, row in enumerate(rows) if id(row) not in self._failed and row.alignment is None]
        if len(places) == len(rows):
            return self._apply(logits_RV, rows, batch)
        changed_RV = logits_RV.to(torch.float32, copy=True)
        changed_RV[failed] = torch.nan
        if places:
            changed_RV[places] = self._apply(logits_RV[places], [rows[place] for place in places], batch)
        return changed_RV

    def _apply(self, logits_RV: Tensor, rows: Sequence[Row], batch: BatchState) -> Tensor:
        update = self._update_batch(rows, batch)
        index_of = {id(entry.row): index for index, entry in enumerate(self._entries)}
        indices = [index_of[id(row)] for row in rows]
        try:
            return self._apply_batched(logits_RV, indices, update)
        except Exception as error:  # user code may raise anything; running requests alone shows which one causes it
            logger.warning(
                "a logits processor raised %s in a batch of %d requests; each request is tried alone",
                type(error).__name__,
                len(rows),
                exc_info=error,
            )
            return self._apply_one_by_one(logits_RV, indices)

    def _apply_batched(self, logits_RV: Tensor, indices: list[int], update: BatchUpdate | None) -> Tensor:
        if self._processors is None:
            self._processors = [factory.make() for factory in self._factories]
            added = [entry.added_at(index) for index, entry in enumerate(self._entries)]
            update = BatchUpdate(len(self._entries), [], added, [])
        is_whole = indices == list(range(len(self._entries)))
        if is_whole:
            logits_BV = logits_RV.to(torch.float32, copy=True)
        else:
            logits_BV = logits_RV.new_zeros((len(self._entries), logits_RV.shape[1]), dtype=torch.float32)
            logits_BV[indices] = logits_RV.float()
        logits_BV = _run(self._processors, update, logits_BV, [entry.params for entry in self._entries])
        return logits_BV if is_whole else logits_BV[indices]

    def _apply_one_by_one(self, logits_RV: Tensor, indices: list[int]) -> Tensor:
        """Apply new processors to each single request. Requests for which one raises fail."""
        changed = []
        for index, logits_V in zip(indices, logits_RV, strict=True):
            entry = self._entries[index]
            logits_1V = logits_V.unsqueeze(0).to(torch.float32, copy=True)
            try:
                processors = [factory.make() for factory in self._factories]
                changed.append(_run(processors, BatchUpdate(1, [], [entry.added_at(0)], []), logits_1V, [entry.params]))
            except Exception as error:  # user code, which may raise anything
                message = f"a logits processor raised {type(error).__name__}: {_text(error)}"
                self._fail(entry.row, StepFault(entry.row.slot, message))
                changed.append(torch.full_like(logits_1V, torch.nan))
        self._entries = [entry for entry in self._entries if id(entry.row) not in self._failed]
        self._processors = None
        return torch.cat(changed)

    def _update_batch(self, rows: Sequence[Row], batch: BatchState) -> BatchUpdate | None:
        """Remove requests that left, and add new ones. Return the changes for the processors, `None` if there are
        none."""
        gaps = []
        for index, entry in enumerate(self._entries):
            if _is_in(entry.row, batch):
                entry.take_output(batch)
            else:
                gaps.append(index)
        present = {id(entry.row) for entry in self._entries}
        added = []
        for row in rows:
            if id(row) not in present:
                entry = _Entry.new(row, batch)
                index = gaps.pop(0) if gaps else len(self._entries)
                self._entries[index : index + 1] = [entry]
                added.append(entry.added_at(index))
        removed = list(gaps)
        moved: list[MovedRequest] = []
        while gaps:
            last = len(self._entries) - 1
            if gaps[-1] == last:
                self._entries.pop()
                gaps.pop()
            else:
                moved.append((last, gaps[0], MoveDirectionality.UNIDIRECTIONAL))
                self._entries[gaps.pop(0)] = self._entries.pop()
        if not (removed or added):
            return None
        return BatchUpdate(len(self._entries), removed, added, moved)

    def _fail(self, row: Row, fault: StepFault) -> None:
        self._failed[id(row)] = row
        self._faults.append(fault)


def caller_params(spec: SamplingSpec) -> SamplingParams:
    """Return a request's parameters as processors see them: resolved, with everything that determines its tokens."""
    return SamplingParams(
        **{name: getattr(spec, name) for name in _COPIED},
        temperature=spec.temperature,
        seed=spec.seed,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=list(spec.stop_token_ids),
        ignore_eos=not spec.eos_token_ids,
        extra_args=spec.extra_args,
    )


def _run(
    processors: Sequence[LogitsProcessor], update: BatchUpdate | None, logits_BV: Tensor, params: list[SamplingParams]
) -> Tensor:
    """Apply processors. Argmax-invariant ones run last, and not for greedy requests."""
    for processor in processors:
        processor.update_state(update)
    invariant = [processor for processor in processors if processor.is_argmax_invariant()]
    for processor in processors:
        if processor not in invariant:
            logits_BV = _checked(processor.apply(logits_BV), logits_BV.shape)
    greedy = [index for index, one in enumerate(params) if one.is_greedy]
    if invariant and len(greedy) < len(params):
        kept = logits_BV[greedy]
        for processor in invariant:
            logits_BV = _checked(processor.apply(logits_BV), logits_BV.shape)
        logits_BV[greedy] = kept
    return logits_BV


def _checked(logits_BV: object, shape: torch.Size) -> Tensor:
    if not isinstance(logits_BV, Tensor) or logits_BV.shape != shape or logits_BV.dtype != torch.float32:
        raise TypeError(f"apply must return float32 logits of shape {tuple(shape)}")
    return logits_BV


def _is_in(row: Row, batch: BatchState) -> bool:
    return batch.rows.get(row.slot) is row


def _text(error: Exception) -> str:
    return str(error)[:MAX_FAULT_CHARS]
