"""Steps that the host computes and samples: code shared by the native and the torch runner."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.logprobs import RowLogprobs
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.program import Program
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import NO_TOKEN, StepPlan
from octavo.worker_proc.batch.inputs import Ints, StepInputs
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.prefault import Prefaulter
from octavo.worker_proc.device.stream import DeviceEvent
from octavo.worker_proc.executor.runner import PROMPT_LOGPROBS_ROWS, ChangeLogits, Rounds, Samples, WaitForCommand
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.sampling.sampler import Draw, DrawAgain, Sampler, as_logits

SMALL_STEP_TOKENS = 16
"""After a step of at most this many tokens, one page is prefaulted. After a larger step the engine is busy, and all
threads together prefault pages faster on first use."""


class Forward(Protocol):
    """A model with its cache, ready for steps. Knows no requests and samples nothing."""

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.executor.runner.Runner`; bytes if the memory is native."""

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.executor.runner.Runner`."""

    @property
    def programs(self) -> Sequence[Program] | None:
        """See `octavo.worker_proc.executor.runner.Runner`."""

    def warm_up(self) -> int:
        """See `octavo.worker_proc.executor.runner.Runner`."""

    def run(self, inputs: StepInputs) -> None:
        """Compute the hidden states of all rows and put their keys and values into the cache."""

    def join_step(self) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""

    def logits(self, rows: Ints) -> Tensor:
        """Return logits_RV in float32 for rows of the last step; overwritten by the next call.

        For a model that pools, which has no vocabulary, this returns the hidden states.
        """

    def repeat(self, rows: Ints) -> Tensor:
        """Repeat `run` and `logits` of these rows after the arrays of the last step were advanced in place."""

    @property
    def features(self) -> Sequence[Tensor]:
        """`Features` of the last step: matrices TD with at least as many rows as the step. Overwritten by the next
        step."""

    @property
    def cross_queries(self) -> Mapping[int, Tensor]:
        """Queries of cross-attention in the last step, for the layers in `CrossCache.aligned_layers`: float32, matrices
        TND with at least as many rows as the step. Overwritten by the next step."""

    def choose_threads(self, work: int) -> int:
        """Return the number of threads for native work between two runs; see `ThreadPolicy.choose`."""

    def use_model(self, model: Model | None) -> None:
        """Compute with another model of the same shapes and the same cache; `None` drops the present one."""


class HostSamples:
    """Sampled tokens of a step; available immediately."""

    __slots__ = ("_rows", "_token_ids")

    def __init__(self, token_ids: list[int], rows: list[RowLogprobs | None] | None) -> None:
        self._token_ids = token_ids
        self._rows = rows

    def token_ids(self) -> list[int]:
        """See `octavo.worker_proc.executor.runner.PendingSamples`."""
        return self._token_ids

    def logprobs(self) -> list[RowLogprobs | None] | None:
        """See `octavo.worker_proc.executor.runner.PendingSamples`."""
        return self._rows


class HostLogprobs:
    """Logprobs of prompt tokens; available immediately."""

    def __init__(self, rows: list[RowLogprobs]) -> None:
        self._rows = rows

    def rows(self) -> list[RowLogprobs]:
        """See `octavo.worker_proc.executor.runner.PendingLogprobs`."""
        return self._rows


class HostRows:
    """Hidden states; available immediately."""

    def __init__(self, hidden_ND: Tensor) -> None:
        self._hidden_ND = hidden_ND

    def rows(self) -> npt.NDArray[np.float32]:
        """See `octavo.worker_proc.executor.runner.PendingRows`."""
        rows: npt.NDArray[np.float32] = self._hidden_ND.numpy()
        return rows


class CompletedEvent:
    """The event of work that is complete when the call returns."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return immediately."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return 0: the event has no time."""
        return 0.0


_COMPLETED = CompletedEvent()


class HostRunner:
    """A `Runner` whose steps are over when `sample` returns.

    When idle, it prefaults memory that later steps will need.

    Args:
        forward: computes the steps.
        sampler: samples from its logits.
        num_blocks: number of blocks of the cache.
        max_logits: most rows of one call of `forward.logits`.
    """

    max_in_flight = 1
    masks_each_draw = True
    reads_block_tables = True

    def __init__(self, forward: Forward, sampler: Sampler, num_blocks: int, max_logits: int) -> None:
        self.forward = forward
        self.max_logits = max_logits
        self._sampler = sampler
        self._repeated: tuple[Samples, DrawAgain] | None = None
        """Samples of the last call of `repeat`, and a function that repeats their draws."""
        # Torch's memory has no huge pages, so there is no long wait for prefaults.
        native_buffers = [buffer for buffer in forward.cache_buffers if buffer.dtype == torch.uint8]
        self._prefaulter = Prefaulter(native_buffers, num_blocks)

    @classmethod
    def build(
        cls, forward: Forward, config: ResolvedConfig, library: NativeLibrary | None, num_blocks: int
    ) -> "HostRunner":
        """Make the runner of a model. It samples through a native library if there is one."""
        sampler = Sampler(config.model.vocab_size, library, config.num_threads, forward.choose_threads)
        return cls(forward, sampler, num_blocks, max(config.max_num_seqs, PROMPT_LOGPROBS_ROWS))

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self.forward.cache_buffers

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self.forward.state_buffers

    @property
    def features(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self.forward.features

    @property
    def programs(self) -> Sequence[Program] | None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self.forward.programs

    def use_model(self, model: Model | None) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        self._repeated = None
        self.forward.use_model(model)

    def on_plan(self, plan: StepPlan, batch: BatchState) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        self._prefaulter.on_plan(plan, batch.num_groups)

    def run(self, inputs: StepInputs, samples: Samples) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        self.forward.run(inputs)

    def repeat(self, samples: Samples) -> HostSamples:
        """See `octavo.worker_proc.executor.runner.Repeater`."""
        logits_RV = self.forward.repeat(samples.indices_N)
        if self._repeated is None or self._repeated[0] is not samples:
            states = [sample.row.sampling for sample in samples]
            draw_again = self._sampler.prepare(states, samples.positions_N, samples.num_outputs_N)
            self._repeated = samples, draw_again
        return HostSamples(self._repeated[1](logits_RV), None)

    def join_step(self) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        self.forward.join_step()

    def prompt_logprobs(
        self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int, position: int
    ) -> HostLogprobs:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        has_logits = spec.logprobs_mode.endswith("logits")
        rows: list[RowLogprobs] = []
        for offset in range(0, len(token_ids), PROMPT_LOGPROBS_ROWS):
            targets = token_ids[offset : offset + PROMPT_LOGPROBS_ROWS]
            first = first_row + offset
            logits_RV = self.forward.logits(np.arange(first, first + len(targets)))
            found = self._sampler.logprobs(logits_RV, targets, [spec.prompt_logprobs or 0] * len(targets))
            named = [spec.named_at(position + offset + index) for index in range(len(targets))]
            if any(named):
                more = self._sampler.logprobs(logits_RV, targets, [one or 0 for one in named])
                found = [row.followed_by(other) for row, other in zip(found, more, strict=True)]
            if has_logits:
                found = [as_logits(*row) for row in zip(found, logits_RV, targets, strict=True)]
            rows += found
        return HostLogprobs(rows)

    def sample(
        self,
        samples: Samples,
        *,
        has_masks: bool,
        change_logits: ChangeLogits | None = None,
        rounds: Rounds | None = None,
    ) -> HostSamples:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        if rounds is None:
            return self._draw(samples, self.forward.logits(samples.indices_N), change_logits)
        token_ids = [NO_TOKEN] * len(samples)
        rows: list[RowLogprobs | None] = [None] * len(samples)
        has_room = len(samples) <= self.max_logits
        logits_NV = self.forward.logits(samples.indices_N) if has_room else None
        while len(places_M := rounds.places_M):
            part = samples.select(places_M)
            logits_MV = self.forward.logits(part.indices_N) if logits_NV is None else logits_NV[places_M]
            drawn = self._draw(part, logits_MV, change_logits)
            for index, (place, token_id) in enumerate(zip(places_M.tolist(), drawn.token_ids(), strict=True)):
                token_ids[place] = token_id
                if (reported := drawn.logprobs()) is not None:
                    rows[place] = reported[index]
            rounds.record(drawn.token_ids())
        return HostSamples(token_ids, rows if any(row is not None for row in rows) else None)

    def _draw(self, samples: Samples, logits_RV: Tensor, change_logits: ChangeLogits | None) -> HostSamples:
        draws = [
            Draw(sample.row.sampling_at(sample.position), sample.position, sample.num_outputs) for sample in samples
        ]
        changed_RV = logits_RV if change_logits is None else change_logits(logits_RV, samples)
        token_ids = self._sampler.sample(changed_RV, draws)
        return HostSamples(token_ids, self._logprobs(logits_RV, changed_RV, draws, token_ids))

    def draw_drafts(self, batch: BatchState, logits_EV: Tensor, slots_E: Ints, positions_E: Ints) -> list[int]:
        """Draw a draft token at each of some positions that are not computed yet, with the noise of the position.

        Args:
            batch: batch of the requests, which is not changed.
            logits_EV: logits of the draft model or head, float32, over the vocabulary of the model.
            slots_E: slots of the requests.
            positions_E: positions of the tokens.
        """
        rows = [batch.rows[slot] for slot in slots_E.tolist()]
        draws = [
            Draw(row.sampling, position, position - row.num_prompt_tokens)
            for row, position in zip(rows, positions_E.tolist(), strict=True)
        ]
        return self._sampler.sample(logits_EV, draws)

    def hidden(self, rows: Ints) -> HostRows:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return HostRows(self.forward.logits(rows))

    def record_event(self) -> CompletedEvent:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return _COMPLETED

    def after_step(self, num_tokens: int) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        if self._prefaulter.has_pages and num_tokens <= SMALL_STEP_TOKENS:
            self._prefaulter.touch_page()

    def warm_up(self) -> int:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        return self.forward.warm_up()

    def on_idle(self, wait_for_command: WaitForCommand) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        self._prefaulter.touch_pages(wait_for_command)

    def _logprobs(
        self, logits_RV: Tensor, changed_RV: Tensor, draws: Sequence[Draw], token_ids: Sequence[int]
    ) -> list[RowLogprobs | None] | None:
        """Return an entry per draw, `None` for a draw without logprobs or token; `None` if there is no entry at all."""
        indices = [
            index
            for index, draw in enumerate(draws)
            if draw.state.spec.logprobs is not None and token_ids[index] != NO_TOKEN
        ]
        if not indices:
            return None
        rows: list[RowLogprobs | None] = [None] * len(draws)
        if len(indices) < len(draws):
            logits_RV, changed_RV = logits_RV[indices], changed_RV[indices]
        chosen = [draws[index] for index in indices]
        found = self._sampler.report(logits_RV, chosen, [token_ids[index] for index in indices], changed_RV)
        for index, row in zip(indices, found, strict=True):
            rows[index] = row
        return rows
