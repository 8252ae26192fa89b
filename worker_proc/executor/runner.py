"""The seam between the executor and what computes its steps. `octavo.worker_proc.runners` has the implementations."""

from collections.abc import Callable, Sequence
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
"""Waits up to this many milliseconds for a command; true if there is one."""
ReceiveMasks = Callable[[], Sequence[TokenMask]]
ChangeLogits = Callable[[Tensor], Tensor]
"""Returns float32 logits_RV for the model's, one row per sampled row: the stage of logits processors."""

PROMPT_LOGPROBS_ROWS = 64
"""Prompt positions whose logits are held at a time. All logits of a chunk would take too much memory."""


@dataclass(slots=True, eq=False)
class SampledRow:
    """One token that a step samples."""

    row: Row
    index: int
    """Its row in the step's hidden states."""
    position: int
    """Number of tokens before it, prompt and outputs."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs before it."""
        return self.position - self.row.num_prompt_tokens


class Samples(Sequence[SampledRow]):
    """The tokens that a step samples: as arrays, and one by one for those who need the requests.

    Args:
        entries: of the step.
        inputs: its arrays.
        batch: whose requests these are; read one by one only before the next plan is applied.
    """

    def __init__(self, entries: StepEntries, inputs: StepInputs, batch: BatchState) -> None:
        # perf: in a step that only decodes nothing has to be selected.
        is_sampled_R: Any = slice(None) if entries.num_samples_R.all() else entries.num_samples_R > 0
        columns = batch.columns
        self.slots_N: Ints = entries.slots_R[is_sampled_R]
        self.indices_N: Ints = inputs.query_starts[1:][is_sampled_R] - 1
        """Their rows in the step's hidden states."""
        self.positions_N: Ints = inputs.context_lens[is_sampled_R]
        """Tokens before them."""
        self.num_outputs_N: Ints = self.positions_N - columns.num_prompt_S[self.slots_N]
        self.admissions_N: Ints = columns.admission_S[self.slots_N]
        self.traits_N: Ints = columns.traits_S[self.slots_N]
        """When the step begins; masks come later."""
        self._has_traits = bool(self.traits_N.any())
        self._batch_rows = batch.rows
        self._rows: list[SampledRow] | None = None

    def with_trait(self, trait: Trait) -> list[int]:
        """Return the places of the requests that have a trait."""
        if not self._has_traits:
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


class PendingSamples(Protocol):
    """What a step has sampled. Readable when the step's event is done."""

    def token_ids(self) -> list[int]:
        """Return one token per sampled row; `NO_TOKEN` where the largest logit is NaN or infinite."""

    def logprobs(self) -> list[RowLogprobs | None] | None:
        """Return one entry per sampled row; None for a request without logprobs, or if no request has any."""


class PendingLogprobs(Protocol):
    """Logprobs of prompt tokens. Readable when the step's event is done."""

    def rows(self) -> list[RowLogprobs]:
        """Return one entry per token."""


class PendingRows(Protocol):
    """Hidden states. Readable when the step's event is done, until the next step."""

    def rows(self) -> npt.NDArray[np.float32]:
        """Return them, one row for each that was asked for."""


class Runner(Protocol):
    """Computes the steps of one model on one device, in order.

    The executor calls, for each plan: `on_plan`; then, if the plan schedules anything, `run`, `prompt_logprobs` for
    each request that asks for them, and `sample` if anything is sampled, or, if the model
    pools, `hidden`; otherwise `join_step`; `record_event`; and
    `after_step` when the result is delivered.
    """

    max_in_flight: int
    """Steps that may be begun before the first of them is over; 1: `sample` returns when the tokens are known."""

    reads_block_tables: bool
    """Whether `run` needs block tables from the host; False: the device has its own copy."""

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """Keys and values of each layer of a group, one after the other, block by block; keys alone if values are parts
        of them."""

    @property
    def programs(self) -> Sequence[Program] | None:
        """Native programs whose operations a trace records; None: torch's profiler sees everything."""

    def warm_up(self) -> int:
        """Do before the first step what steps would otherwise wait for; returns the number of graphs captured."""

    def use_model(self, model: Model | None) -> None:
        """Compute with another model of the same shapes, and the same cache, from the next step on.

        `model`: None: forget the present one, so that its memory is free; another one follows before the next step.
        """

    def on_plan(self, plan: StepPlan, batch: BatchState) -> None:
        """Note the changes of a plan, which `batch` has applied."""

    def run(self, inputs: StepInputs, samples: Samples) -> None:
        """Compute the hidden states of all rows and store their keys and values; `sample` gets the same `samples`."""

    def join_step(self) -> None:
        """Do this rank's part of a step of other engines that divide the experts with this one; none, if none do."""

    def prompt_logprobs(self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int) -> PendingLogprobs:
        """Compute the logprobs of consecutive prompt tokens, the first of which follows the step's row `first_row`."""

    def sample(self, samples: Samples, *, has_masks: bool, change_logits: ChangeLogits | None = None) -> PendingSamples:
        """Sample one token for each of the rows that were given to `run`.

        Args:
            samples: as for `run`.
            has_masks: the states of some requests have a mask for this token. The host then knows the tokens of all
                steps before, as it does if a request has a bad word of several tokens, or if there is `change_logits`.
            change_logits: to be called once.
        """

    def hidden(self, rows: Ints) -> PendingRows:
        """Return the hidden states of some of the step's rows, at least one, of a model that pools."""

    def record_event(self) -> DeviceEvent:
        """Return an event that is done when everything begun so far is."""

    def after_step(self, num_tokens: int) -> None:
        """Do small background work after a result was delivered; `num_tokens` is the size of its step."""

    def on_idle(self, wait_for_command: WaitForCommand) -> None:
        """Prepare for later steps when no command has come for a moment, and stop as soon as one comes."""
