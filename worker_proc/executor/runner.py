"""The interface between the executor and the code that computes its steps. `octavo.worker_proc.runners` implements
it."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.kernels.logprobs import RowLogprobs
from octavo.kernels.native.program import Program
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import StepPlan, StepResult, TokenMask
from octavo.worker_proc.batch.columns import Trait
from octavo.worker_proc.batch.inputs import Ints, StepEntries, StepInputs
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import DeviceEvent
from octavo.worker_proc.models.base import Model

Deliver = Callable[[StepResult], None]
WaitForCommand = Callable[[int], object]
"""Waits up to this many milliseconds for a command. Returns true if there is one."""
ReceiveMasks = Callable[[], Sequence[TokenMask]]
NO_DRAFT_TOKEN = -4
"""Marks the absence of a draft; differs from `NO_TOKEN`, `POOLED`, `UNREAD_DRAFT` and `DRAFTED`."""

PROMPT_LOGPROBS_ROWS = 64
"""Prompt positions whose logits are computed at a time: all logits of a chunk would take too much memory."""


@dataclass(slots=True, eq=False)
class SampledRow:
    """One token that a step samples."""

    row: Row
    index: int
    """Row in the step's hidden states."""
    position: int
    """Number of tokens before it: prompt and outputs."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs before it."""
        return self.position - self.row.num_prompt_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """The samples of a step with drafts that became tokens of their requests."""

    places: Ints
    """Indices among all samples, ascending."""
    counts: list[int]
    """Number of accepted samples of each sampled request."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """The drafts that a step verifies, as arrays over its N samples."""

    token_ids_N: Ints
    """Draft that each sample verifies; `NO_DRAFT_TOKEN` for the last sample of each request."""
    offsets_N: Ints
    """Number of drafts before each sample."""
    counts_N: Ints
    """Number of samples of the sample's request."""

    @property
    def first_samples(self) -> Ints:
        """Index of the first sample of each request that has drafts."""
        first_samples: Ints = ((self.offsets_N == 0) & (self.counts_N > 1)).nonzero()[0]
        return first_samples

    def by_request(self) -> tuple[Ints, Ints]:
        """Return the drafts of each of E requests as drafts_KE, padded with `NO_DRAFT_TOKEN`, and their numbers."""
        counts_E = self.counts_N[self.offsets_N == 0] - 1
        given_KE = np.full((counts_E.max(), len(counts_E)), NO_DRAFT_TOKEN)
        is_draft_N = self.offsets_N < self.counts_N - 1
        requests_N = (self.offsets_N == 0).cumsum() - 1
        given_KE[self.offsets_N[is_draft_N], requests_N[is_draft_N]] = self.token_ids_N[is_draft_N]
        return given_KE, counts_E

    def accepted(self, tokens_N: Ints) -> Accepted:
        """Return the samples before the first wrong draft of each request, and the sample that replaces that draft."""
        starts_E = (self.offsets_N == 0).nonzero()[0]
        wrong = (tokens_N != self.token_ids_N).nonzero()[0]  # the last sample of each request always differs
        ends_E = wrong[np.searchsorted(wrong, starts_E)] + 1
        counts_E = ends_E - starts_E
        places = (self.offsets_N < np.repeat(counts_E, self.counts_N[starts_E])).nonzero()[0]
        return Accepted(places, counts_E.tolist())


class Samples(Sequence[SampledRow]):
    """The tokens that a step samples: as arrays, and one by one where requests are needed.

    A request with drafts has several samples, in order of position: one after its last known token, and one after each
    draft, computed as if all earlier drafts were its tokens.

    Args:
        entries: entries of the step.
        inputs: arrays of the step.
        batch: the batch of these requests. Its rows may be read one by one only before the next plan is applied.
    """

    def __init__(self, entries: StepEntries, inputs: StepInputs, batch: BatchState) -> None:
        # perf: a pure decode step samples every row, so nothing has to be selected.
        is_sampled_R: Any = slice(None) if entries.num_samples_R.all() else entries.num_samples_R > 0
        columns = batch.columns
        self.slots_N: Ints = entries.slots_R[is_sampled_R]
        self.indices_N: Ints = inputs.query_starts[1:][is_sampled_R] - 1
        """Rows of the samples in the step's hidden states."""
        self.positions_N: Ints = inputs.context_lens[is_sampled_R]
        """Number of tokens before each sample."""
        self.draft_tokens: DraftTokens | None = None
        """`None` if no request has drafts."""
        counts_E = entries.num_samples_R[is_sampled_R]
        if len(counts_E) and counts_E.max() > 1:
            offsets_N = np.arange(counts_E.sum()) - np.repeat(counts_E.cumsum() - counts_E, counts_E)
            self.slots_N = np.repeat(self.slots_N, counts_E)
            self.indices_N = np.repeat(self.indices_N - counts_E + 1, counts_E) + offsets_N
            self.positions_N = np.repeat(self.positions_N - counts_E + 1, counts_E) + offsets_N
            is_last_N = offsets_N == np.repeat(counts_E - 1, counts_E)
            following_N = inputs.token_ids_T[np.where(is_last_N, 0, self.indices_N + 1)]
            self.draft_tokens = DraftTokens(
                np.where(is_last_N, NO_DRAFT_TOKEN, following_N), offsets_N, np.repeat(counts_E, counts_E)
            )
        self.num_outputs_N: Ints = self.positions_N - columns.num_prompt_S[self.slots_N]
        self.admissions_N: Ints = columns.admission_S[self.slots_N]
        self.traits_N: Ints = columns.traits_S[self.slots_N]
        """Traits when the step begins; masks arrive later."""
        self.has_traits = bool(self.traits_N.any())
        self._batch_rows = batch.rows
        self._rows: list[SampledRow] | None = None

    def select(self, places_M: Ints) -> "Samples":
        """Return some of these samples, without their drafts."""
        part = copy(self)
        for name in ("slots_N", "indices_N", "positions_N", "num_outputs_N", "admissions_N", "traits_N"):
            setattr(part, name, getattr(self, name)[places_M])
        part.draft_tokens, part._rows = None, None
        return part

    def advance(self) -> None:
        """Advance by one token after the arrays of a decode step were advanced in place."""
        self.num_outputs_N += 1
        self._rows = None

    def append_pending(self, batch: BatchState) -> None:
        """Append a pending token for each request that gets exactly one, so that its next step can be planned.

        How many tokens the other requests get is not known yet.
        """
        if self.draft_tokens is None:
            batch.append_pending(self.slots_N, self.positions_N)
        else:
            is_alone_N = self.draft_tokens.counts_N == 1
            batch.append_pending(self.slots_N[is_alone_N], self.positions_N[is_alone_N])

    def exclude(self, draws: Sequence[tuple[int, int]]) -> None:
        """Skip some draws after drafts, given as (slot, number of drafts before the draw). Their drafts count as
        wrong."""
        for slot, num_draft_tokens in draws:
            assert self.draft_tokens is not None, "a draw after drafts"
            is_draft_N = (self.slots_N == slot) & (self.draft_tokens.offsets_N == num_draft_tokens - 1)
            self.draft_tokens.token_ids_N[is_draft_N] = NO_DRAFT_TOKEN

    def with_trait(self, trait: Trait) -> list[int]:
        """Return the indices of the samples whose requests have a trait."""
        if not self.has_traits:
            return []
        places: list[int] = (self.traits_N & int(trait)).nonzero()[0].tolist()
        return places

    def __len__(self) -> int:
        return len(self.slots_N)

    @overload
    def __getitem__(self, place: int) -> SampledRow: ...

    @overload
    def __getitem__(self, place: slice) -> list[SampledRow]: ...

    def __getitem__(self, place: int | slice) -> SampledRow | list[SampledRow]:
        if self._rows is None:
            numbers = zip(self.slots_N.tolist(), self.indices_N.tolist(), self.positions_N.tolist(), strict=True)
            self._rows = [SampledRow(self._batch_rows[slot], index, position) for slot, index, position in numbers]
        return self._rows[place]


ChangeLogits = Callable[[Tensor, Samples], Tensor]
"""The stage of logits processors: returns float32 logits_RV that replace the model's, one row per given sample."""


class PendingSamples(Protocol):
    """Sampled tokens of a step. Readable when the step's event is done."""

    def token_ids(self) -> list[int]:
        """Return one token per sampled row; `NO_TOKEN` where the largest logit is NaN or infinite.

        Tokens after a wrong draft have no meaning.
        """

    def logprobs(self) -> list[RowLogprobs | None] | None:
        """Return one entry per sampled row, `None` for a request without logprobs. `None` if no request has any."""


class PendingLogprobs(Protocol):
    """Logprobs of prompt tokens. Readable when the step's event is done."""

    def rows(self) -> list[RowLogprobs]:
        """Return one entry per token."""


class PendingRows(Protocol):
    """Hidden states. Readable when the step's event is done, until the next step."""

    def rows(self) -> npt.NDArray[np.float32]:
        """Return one row per requested row."""


class Rounds(Protocol):
    """Draws of a step in rounds: each draw is made after the tokens before it are known.

    Call `record` with the tokens of `places_M` until `places_M` is empty.
    """

    places_M: Ints
    """Indices of the samples to draw next. A request whose state follows its tokens appears at most once."""

    def record(self, token_ids: Sequence[int]) -> None:
        """Record the tokens of `places_M`, append the accepted ones to the batch, and select the next samples."""


class Repeater(Protocol):
    """A runner that can repeat its last step after the step's arrays were advanced in place.

    Every step is over when its call returns.
    """

    def repeat(self, samples: "Samples") -> PendingSamples:
        """Repeat what `run` and `sample` did with these samples, which need no masks and no rounds."""


class Runner(Protocol):
    """Computes the steps of one model on one device, in order.

    For each plan the executor calls `on_plan` first. If the plan schedules anything, it calls `run`, `prompt_logprobs`
    for each request with prompt logprobs, and then `sample` if anything is sampled, or `hidden` if the model pools.
    Otherwise it calls `join_step`. It then calls `record_event`, and `after_step` when the result is delivered.
    """

    max_in_flight: int
    """Maximum number of steps in flight. With 1, tokens are known when `sample` returns."""

    max_logits: int
    """Maximum rows of logits."""

    masks_each_draw: bool
    """Whether draws after drafts that are made together may have separate masks; False: one mask per slot."""

    reads_block_tables: bool
    """Whether `run` needs block tables from the host; False: the device has its own copy."""

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """Keys and values of each layer of a group, one after the other, block by block; only keys if values are parts
        of keys."""

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """Recurrent states of each layer, slot by slot; () if the model has none."""

    @property
    def features(self) -> Sequence[Tensor]:
        """Hidden states that the model passes to a draft head; see `octavo.worker_proc.runners.host.Forward`."""

    @property
    def programs(self) -> Sequence[Program] | None:
        """Native programs whose operations a trace records; `None` if torch's profiler sees everything."""

    def warm_up(self) -> int:
        """Do the work that would delay the first step. Return the number of captured graphs."""

    def use_model(self, model: Model | None) -> None:
        """Compute with another model of the same shapes and the same cache from the next step on.

        `None` drops the present model, so that its memory can be freed. Another model follows before the next step.
        """

    def on_plan(self, plan: StepPlan, batch: BatchState) -> None:
        """Note the changes of a plan, after `batch` has applied it."""

    def run(self, inputs: StepInputs, samples: Samples) -> None:
        """Compute the hidden states of all rows and store their keys and values. `sample` gets the same `samples`."""

    def join_step(self) -> None:
        """Take part in a step of other engines that divide the experts with this one, if there are any."""

    def prompt_logprobs(
        self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int, position: int
    ) -> PendingLogprobs:
        """Compute the logprobs of consecutive prompt tokens.

        Logprobs of tokens that `spec` names come after those of the most likely tokens.

        Args:
            spec: sampling spec of the request.
            token_ids: prompt tokens.
            first_row: row of the step after which the first of these tokens comes.
            position: position of the first of these tokens in the prompt.
        """

    def sample(
        self,
        samples: Samples,
        *,
        has_masks: bool,
        change_logits: ChangeLogits | None = None,
        rounds: Rounds | None = None,
    ) -> PendingSamples:
        """Sample one token for each of the `samples` that were passed to `run`.

        Args:
            samples: see `run`.
            has_masks: whether some requests have a mask for this token. The host then knows the tokens of all earlier
                steps, as it does if a request has a bad word of several tokens, or if there is `change_logits`.
            change_logits: must be called once, or once per round.
            rounds: rounds of draws, if some draws depend on earlier tokens, which are drafts; `None` if all draws are
                independent.
        """

    def hidden(self, rows: Ints) -> PendingRows:
        """Return the hidden states of some of the step's rows, at least one, of a model that pools."""

    def record_event(self) -> DeviceEvent:
        """Return an event that is done when all work begun so far is."""

    def after_step(self, num_tokens: int) -> None:
        """Do small background work after a result was delivered. `num_tokens` is the size of its step."""

    def on_idle(self, wait_for_command: WaitForCommand) -> None:
        """Prepare for later steps when no command has arrived for a moment. Stop as soon as one arrives."""
