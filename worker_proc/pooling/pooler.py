"""Collects the hidden states of requests over the chunks of their prompts, and makes results from them.

Rows are summed one by one in token order, and heads take one vector at a time, so a result does not depend on how a
prompt was divided, or on other requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from octavo.protocol.buffers import Buffer
from octavo.protocol.events import PooledOutput
from octavo.protocol.ids import SlotId
from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import PoolingFacts
from octavo.protocol.steps import NO_TOKEN, POOLED, Scheduled
from octavo.worker_proc.batch.inputs import Ints, StepInputs
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.executor.runner import PendingRows, Runner
from octavo.worker_proc.pooling.collected import Collected, Floats
from octavo.worker_proc.pooling.heads import ACTIVATIONS, PoolingHead

_SMALLEST_LENGTH = 1e-12
"""Smallest length of a vector that is normalized, as in torch."""

BY_TOKEN = ("all", "step")


@dataclass(slots=True, eq=False)
class _Part:
    """The part of one request that a step computes."""

    row: Row
    spec: PoolingSpec
    num_rows: int
    """Number of hidden states of this step that its result needs."""
    is_last: bool
    """Whether the prompt ends here."""
    vector: Callable[[], Floats] | None = None
    """Returns the vector of a request that is an image alone; `None` if the result is made from hidden states."""


@dataclass(slots=True, eq=False)
class PendingPooled:
    """The results of a step, made once its hidden states are readable."""

    pooler: "Pooler"
    parts: Sequence[_Part]
    hidden: PendingRows | None
    """Hidden states of the step; `None` if no request needs any."""
    outputs: list[PooledOutput] = field(default_factory=list)
    """One output per request whose prompt has ended, unless its values are not finite; follows `token_ids`."""

    def token_ids(self) -> list[int]:
        """Make the results. Return `POOLED` or `NO_TOKEN` for each request whose prompt has ended."""
        hidden_ND = self.hidden.rows() if self.hidden is not None else np.empty((0, 0), np.float32)
        end, tokens = 0, []
        for part in self.parts:
            start, end = end, end + part.num_rows
            if part.num_rows:
                part.row.collected.add(hidden_ND[start:end], keeps_all=part.spec.pooling in BY_TOKEN)
            if part.is_last:
                vector_D = None if part.vector is None else part.vector()
                output = self.pooler.result(part.spec, part.row.collected, vector_D)
                tokens.append(NO_TOKEN if output is None else POOLED)
                self.outputs += [] if output is None else [output]
        return tokens

    def logprobs(self) -> None:
        """Return `None`: there are no logprobs."""


class Pooler:
    """Makes the results of one model's requests.

    Args:
        facts: how the model pools.
        head: layers applied to pooled vectors; `None` if the model does not pool, which is a bug.
    """

    def __init__(self, facts: PoolingFacts, head: PoolingHead | None) -> None:
        self._facts = facts
        self.use_head(head)

    def use_head(self, head: PoolingHead | None) -> None:
        """Compute with another head from now on, or with new weights of the same one."""
        assert head is not None, "a model that generates tokens"
        head.prepare()
        self._head = head

    def pool(
        self,
        scheduled: Sequence[Scheduled],
        inputs: StepInputs,
        batch: BatchState,
        runner: Runner,
        vectors: Mapping[SlotId, Callable[[], Floats]] = MappingProxyType({}),
    ) -> PendingPooled:
        """Begin to collect the results of a step.

        Args:
            scheduled: entries of the step.
            inputs: arrays of the step.
            batch: batch of the requests, before the next plan is applied.
            runner: runner that has begun the step.
            vectors: returns vectors of requests that are an image alone. Called when the step is over: their hidden
                states are not read.
        """
        parts, chosen = [], []
        for entry, first in zip(scheduled, inputs.query_starts.tolist(), strict=False):
            row = batch.rows[entry.slot]
            spec, is_last = row.pooling, entry.num_samples > 0
            assert spec is not None, "an engine that pools has no other requests"
            if entry.slot in vectors:
                parts.append(_Part(row, spec, 0, is_last, vectors[entry.slot]))
                continue
            rows = _rows_of(spec, entry, inputs.token_ids_T[first : first + entry.num_tokens], is_last=is_last)
            parts.append(_Part(row, spec, len(rows), is_last))
            chosen.append(rows + first)
        rows = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
        return PendingPooled(self, parts, runner.hidden(rows) if len(rows) else None)

    def result(self, spec: PoolingSpec, collected: Collected, vector_D: Floats | None = None) -> PooledOutput | None:
        """Return the result of a request, from hidden states or from its vector; `None` if its numbers overflow."""
        if vector_D is not None:
            values = vector_D
        elif spec.pooling in BY_TOKEN:
            values = self._by_token(collected.chunks)
        else:
            values = self._head(collected.mean() if spec.pooling == "mean" else collected.sum_D)
        values = self._finished(spec, values)
        if not np.isfinite(values).all():
            return None
        return PooledOutput(Buffer(values.tobytes()), values.shape, "float32")

    def _by_token(self, chunks: Sequence[Floats]) -> Floats:
        if not chunks:  # no token is the step tag
            return np.empty((0, self._facts.num_labels), np.float32)
        hidden_ND = np.concatenate(chunks)
        return hidden_ND if self._head.is_empty else np.stack([self._head(x_D) for x_D in hidden_ND])

    def _finished(self, spec: PoolingSpec, values: Floats) -> Floats:
        """Cut and normalize embeddings; apply the activation to class scores, and choose some."""
        if self._facts.convert == "embed":
            if spec.dimensions:
                values = values[..., : spec.dimensions]
            if spec.use_activation and self._facts.normalize:
                lengths = np.sqrt(np.square(values, dtype=np.float64).sum(-1, keepdims=True))
                values = (values / np.maximum(lengths, _SMALLEST_LENGTH)).astype(np.float32)
            return values
        if spec.use_activation:
            values = ACTIVATIONS[self._facts.activation](values)
        return values[..., list(spec.returned_token_ids)] if spec.returned_token_ids else values


def _rows_of(spec: PoolingSpec, entry: Scheduled, token_ids_T: Ints, *, is_last: bool) -> Ints:
    """Return the rows of a request whose hidden states its result needs."""
    match spec.pooling:
        case "cls":
            return np.arange(min(1, entry.num_tokens) if entry.start == 0 else 0)
        case "last":
            return np.arange(entry.num_tokens - is_last, entry.num_tokens)
        case "step" if spec.step_tag_id >= 0:
            return np.flatnonzero(token_ids_T == spec.step_tag_id)
        case _:
            return np.arange(entry.num_tokens)
