"""Logprobs of a step's samples and of its prompt tokens, read when the step is over.

Two kernels after the draw report up to `MAX_TOP` most likely tokens. A step with a request that names tokens or needs
more samples without a graph; its logprobs are computed from the same logits, with the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.logprobs import RowLogprobs, logprobs_of_rows
from octavo.kernels.logprobs.memory import MAX_TOP, LogprobsMemory
from octavo.kernels.sample import processed_logits
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.batch.columns import Trait
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.executor.runner import PROMPT_LOGPROBS_ROWS, Samples
from octavo.worker_proc.runners.cuda_graphs.graphs import StepGraphs
from octavo.worker_proc.runners.cuda_graphs.slot_table import SlotTable
from octavo.worker_proc.sampling.state import LARGEST


@dataclass(frozen=True, slots=True, eq=False)
class RowsLogprobs:
    """Logprobs of some rows in host buffers, readable when their step is over."""

    chosen_R: Tensor
    rank_R: Tensor
    top_ids_RK: Tensor
    top_RK: Tensor

    def row(self, index: int, num_top: int) -> RowLogprobs:
        """Return the logprobs of one row, with this many of its most likely tokens."""
        top_ids_K, top_K = self.top_ids_RK[index, :num_top], self.top_RK[index, :num_top]
        return RowLogprobs(float(self.chosen_R[index]), int(self.rank_R[index]), top_ids_K.tolist(), top_K.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class SampleLogprobs:
    """Logprobs of the samples of a step whose requests report them, in order."""

    rows: Sequence[int]
    """Row of each of these samples."""
    top: RowsLogprobs
    named: RowsLogprobs | None
    """Logprobs of tokens that requests name explicitly; `None` if no request names any."""

    def row(self, index: int, spec: SamplingSpec) -> RowLogprobs:
        """Return the logprobs of one sample, given its index among those that report any."""
        num_named = len(spec.logprob_token_ids)
        if self.named is not None and num_named:
            return self.named.row(self.rows[index], num_named)
        return self.top.row(self.rows[index], spec.logprobs or 0)


@dataclass(frozen=True, slots=True, eq=False)
class DevicePromptLogprobs:
    """The `PendingLogprobs` of a GPU."""

    pieces: list[tuple[RowsLogprobs, RowsLogprobs | None]]
    """Logprobs of the most likely tokens, and of the tokens that the request names for any of these positions."""
    num_top: int
    num_named: list[int]
    """Number of tokens that the request names for each position."""

    def rows(self) -> list[RowLogprobs]:
        """See `octavo.worker_proc.executor.runner.PendingLogprobs`."""
        found: list[RowLogprobs] = []
        for top, named in self.pieces:
            for index in range(len(top.chosen_R)):
                row, count = top.row(index, self.num_top), self.num_named[len(found)]
                found.append(row.followed_by(named.row(index, count)) if named is not None and count else row)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Reported:
    """The samples of a step that report logprobs, and the values that the logprobs are computed from."""

    places_A: Tensor
    """int64, indices among all samples of the step."""
    values_AV: Tensor
    """The model's logits, or the processed logits that tokens are sampled from."""
    is_logit_A: Tensor | None
    """Rows that report the value itself instead of its logprob; `None` if none does."""
    num_top: int
    """Largest number of most likely tokens in a row."""
    named_AL: Tensor | None
    """int64, tokens that requests name explicitly, padded with token 0; `None` if no request names any."""


class LogprobReporter:
    """Computes logprobs of the latest step. The host never waits for the device.

    Args:
        graphs: graphs that computed the step.
        stream: stream of the device.
    """

    def __init__(self, graphs: StepGraphs, stream: Stream) -> None:
        self._graphs = graphs
        self._stream = stream

    def of_draws(self, memory: LogprobsMemory, places: Sequence[int]) -> SampleLogprobs:
        """Return the logprobs reported by the sampling kernels of a step; `places` are the rows that report."""
        columns = (memory.chosen, memory.ranks, memory.top_ids, memory.top)
        return SampleLogprobs(places, RowsLogprobs(*map(self._stream.download, columns)), None)

    def warm_up(self, table: SlotTable) -> None:
        """Launch all kernels for a row of the latest step, so that they are compiled."""
        row_1, slot_1 = self._upload(np.zeros(1, np.int64)), self._upload(np.array([table.idle_slot]))
        values_1V = self._graphs.logits_of(row_1)
        processed_1V = processed_logits(values_1V, table.requests, slot_1, row_1, largest=LARGEST)
        self._logprobs(processed_1V, row_1, 1, self._upload(np.ones(1, dtype=bool)))
        self._logprobs(values_1V, row_1, MAX_TOP + 1, None)
        self._logprobs(values_1V, row_1, row_1.unsqueeze(1), None)

    def before_sampling(self, samples: Samples, table: SlotTable, raw_NV: Tensor, drawn_from_NV: Tensor) -> Reported:
        """Take the values to report, before sampling changes the counts of the requests.

        Args:
            samples: samples of the step, some of which report logprobs.
            table: table of the slots.
            raw_NV: the model's logits, float32.
            drawn_from_NV: the logits that tokens are drawn from.
        """
        places = samples.with_trait(Trait.REPORTS_LOGPROBS)
        reported = [samples[place] for place in places]
        specs = [sample.row.sampling.spec for sample in reported]
        places_A = self._upload(np.array(places))
        values_AV = raw_NV.index_select(0, places_A)
        is_processed = [spec.logprobs_mode.startswith("processed") for spec in specs]
        if any(is_processed):
            slots = np.array([sample.row.slot for sample in reported])
            num_outputs = np.array([sample.num_outputs for sample in reported])
            drawn_from_AV = drawn_from_NV.index_select(0, places_A)
            processed_AV = processed_logits(
                drawn_from_AV, table.requests, self._upload(slots), self._upload(num_outputs), largest=LARGEST
            )
            values_AV = torch.where(self._upload(np.array(is_processed)).unsqueeze(1), processed_AV, values_AV)
        is_logit = np.array([spec.logprobs_mode.endswith("logits") for spec in specs])
        num_top = max(spec.logprobs or 0 for spec in specs)
        is_logit_A = self._upload(is_logit) if is_logit.any() else None
        return Reported(
            places_A, values_AV, is_logit_A, num_top, self._padded([spec.logprob_token_ids for spec in specs])
        )

    def after_sampling(self, reported: Reported, tokens_N: Tensor) -> SampleLogprobs:
        """Return the logprobs, given the tokens of all samples of the step. Where there is no token, values are
        arbitrary."""
        tokens_A = tokens_N.index_select(0, reported.places_A).clamp(min=0)
        top = self._logprobs(reported.values_AV, tokens_A, reported.num_top, reported.is_logit_A)
        named = None
        if reported.named_AL is not None:
            named = self._logprobs(reported.values_AV, tokens_A, reported.named_AL, reported.is_logit_A)
        return SampleLogprobs(range(len(tokens_A)), top, named)

    def logits_of(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the model's logits of some rows, float32."""
        return self._graphs.logits_of(self._upload(rows))

    def of_prompt(
        self, spec: SamplingSpec, token_ids: Sequence[int], first_row: int, position: int
    ) -> DevicePromptLogprobs:
        """Return the logprobs of consecutive prompt tokens; see `octavo.worker_proc.executor.runner.Runner`."""
        pieces: list[tuple[RowsLogprobs, RowsLogprobs | None]] = []
        named = [spec.named_at(position + index) for index in range(len(token_ids))]
        for offset in range(0, len(token_ids), PROMPT_LOGPROBS_ROWS):
            targets = np.array(token_ids[offset : offset + PROMPT_LOGPROBS_ROWS])
            rows = np.arange(first_row + offset, first_row + offset + len(targets))
            logits_RV = self._graphs.logits_of(self._upload(rows))
            is_logit = np.ones(len(targets), dtype=bool) if spec.logprobs_mode.endswith("logits") else None
            is_logit_R = None if is_logit is None else self._upload(is_logit)
            targets_R, named_RL = self._upload(targets), self._padded(named[offset : offset + len(targets)])
            top = self._logprobs(logits_RV, targets_R, spec.prompt_logprobs or 0, is_logit_R)
            own = None if named_RL is None else self._logprobs(logits_RV, targets_R, named_RL, is_logit_R)
            pieces.append((top, own))
        return DevicePromptLogprobs(pieces, spec.prompt_logprobs or 0, list(map(len, named)))

    def _padded(self, lists: Sequence[Sequence[int]]) -> Tensor | None:
        """Return lists of token ids as a matrix, padded with token 0; `None` if all are empty."""
        if not any(lists):
            return None
        named_AL = np.zeros((len(lists), max(map(len, lists))), dtype=np.int64)
        for row, token_ids in zip(named_AL, lists, strict=True):
            row[: len(token_ids)] = token_ids
        return self._upload(named_AL)

    def _logprobs(
        self, values_RV: Tensor, token_ids_R: Tensor, top: int | Tensor, is_logit_R: Tensor | None
    ) -> RowsLogprobs:
        chosen_R, rank_R, top_ids_RK, top_RK = logprobs_of_rows(values_RV, token_ids_R, top)
        if is_logit_R is not None:
            own_R = values_RV.gather(1, token_ids_R.unsqueeze(1)).squeeze(1)
            chosen_R = torch.where(is_logit_R, own_R, chosen_R)
            top_RK = torch.where(is_logit_R.unsqueeze(1), values_RV.gather(1, top_ids_RK), top_RK)
        return RowsLogprobs(*map(self._stream.download, (chosen_R, rank_R, top_ids_RK, top_RK)))

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return upload_array(self._stream, array)
