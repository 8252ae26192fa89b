"""The seam between the executor and what computes its steps. `octavo.worker_proc.runners` has the implementations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels.logprobs import RowLogprobs
from octavo.kernels.native.program import Program
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import StepPlan, StepResult, TokenMask
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import DeviceEvent

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


class Runner(Protocol):
    """Computes the steps of one model on one device, in order.

    The executor calls, for each plan: `on_plan`; then, if the plan schedules anything, `run`, `prompt_logprobs` for
    each request that asks for them, and `sample` if anything is sampled; `record_event`; and `after_step` when the
    result is delivered.
    """

    max_in_flight: int
    """Steps that may be begun before the first of them is over; 1: `sample` returns when the tokens are known."""

    reads_block_tables: bool
    """Whether `run` needs block tables from the host; False: the device has its own copy."""

    @property
    def programs(self) -> Sequence[Program] | None:
        """Native programs whose operations a trace records; None: torch's profiler sees everything."""

    def prepare(self) -> None:
        """Do before the first step what steps would otherwise wait for."""

    def on_plan(self, plan: StepPlan, batch: BatchState) -> None:
        """Note the changes of a plan, which `batch` has applied."""

    def run(self, inputs: StepInputs, samples: Sequence[SampledRow]) -> None:
        """Compute the hidden states of all rows and store their keys and values; `sample` gets the same `samples`."""

    def prompt_logprobs(self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int) -> PendingLogprobs:
        """Compute the logprobs of consecutive prompt tokens, the first of which follows the step's row `first_row`."""

    def sample(
        self, samples: Sequence[SampledRow], *, has_masks: bool, change_logits: ChangeLogits | None = None
    ) -> PendingSamples:
        """Sample one token for each of the rows that were given to `run`.

        Args:
            samples: as for `run`.
            has_masks: the states of some requests have a mask for this token. The host then knows the tokens of all
                steps before, as it does if a request has a bad word of several tokens, or if there is `change_logits`.
            change_logits: to be called once.
        """

    def record_event(self) -> DeviceEvent:
        """Return an event that is done when everything begun so far is."""

    def after_step(self, num_tokens: int) -> None:
        """Do small background work after a result was delivered; `num_tokens` is the size of its step."""

    def on_idle(self, wait_for_command: WaitForCommand) -> None:
        """Prepare for later steps when no command has come for a moment, and stop as soon as one comes."""
