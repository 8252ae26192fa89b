"""Steps one behind another on a device: a plan is begun while the one before is computed, and results come in order.

The counterpart of `step.execute` where the host does not compute. Decides nothing and sends nothing.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.steps import NO_TOKEN, Scheduled, StepPlan
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.batch.outputs import step_result, token_logprobs
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.pipeline.flights import Drawn, Flight, PromptPart, Watch
from octavo.worker_proc.pipeline.metadata import DrawRows
from octavo.worker_proc.pipeline.reports import Reporter
from octavo.worker_proc.pipeline.runner import StepRunner
from octavo.worker_proc.pipeline.slot_table import SlotTable
from octavo.worker_proc.pipeline.step_buffer import NUM_HOST_BUFFERS
from octavo.worker_proc.step.steps import ComesWithin, Deliver, TakeMasks

IDLE_MS = 20
"""Without a command for so long the engine has nothing to do for some time."""


class PipelinedExecutor:
    """Applies plans to the batch and has a device compute them, up to `NUM_HOST_BUFFERS` at once.

    Args:
        state: of the batch, on the host.
        table: the same on the device.
        runner: of the kernels.
        stream: of the device.
        deliver: takes the result of each plan, in order.
    """

    def __init__(
        self, state: BatchState, table: SlotTable, runner: StepRunner, stream: Stream, deliver: Deliver
    ) -> None:
        self.runner = runner
        self._state = state
        self._table = table
        self._stream = stream
        self._deliver = deliver
        self._reporter = Reporter(runner, stream)
        self._flights: deque[Flight] = deque()
        self._last_end_s = 0.0
        self._watch = Watch()

    def fileno(self) -> int:
        """Return what becomes readable when a step is over; then call `deliver_results`."""
        return self._watch.fileno()

    @torch.inference_mode()
    def begin(self, plan: StepPlan, take_masks: TakeMasks = tuple) -> None:
        """Have the device compute a plan after those before it.

        Args:
            plan: the step.
            take_masks: waits for the step's masks and returns them. Called when the results of all steps before are
                delivered, for from those the masks are made.

        Blocks until: one of the steps before is over, if there are too many; all of them, where a draw needs their
            tokens on the host.

        Raises:
            ProtocolError: the plan or the masks do not fit the batch.
        """
        started_s = time.perf_counter()
        while len(self._flights) >= NUM_HOST_BUFFERS:
            self._finish_oldest()
        self._apply(plan)
        if not plan.scheduled:
            self._fly(Flight(plan.sequence, started_s, (), None, None, (), self._stream.mark()))
            return
        inputs = self._state.inputs_of(plan.scheduled)
        rows = [self._state.rows[entry.slot] for entry in plan.scheduled]
        drawing = [index for index, entry in enumerate(plan.scheduled) if entry.samples]
        drawn = [_drawn(plan.scheduled[index], rows[index]) for index in drawing]
        draws = _draw_rows(inputs, drawing, drawn)
        self.runner.stage(inputs, draws)
        self.runner.compute()
        prompts = [
            part
            for entry, row, first in zip(plan.scheduled, rows, inputs.query_starts.tolist(), strict=False)
            if row.sampling.spec.prompt_logprobs is not None and (part := self._prompt_part(entry, row, first))
        ]
        tokens_N = logprobs = None
        if drawn:
            self._bind_draws(plan, drawn, take_masks)
            asked = self._reporter.before_draw(drawn, draws.rows_N, self._table)
            on_device_N = self.runner.draw()
            logprobs = self._reporter.after_draw(asked, on_device_N) if asked else None
            tokens_N = self._stream.download(on_device_N[: len(drawn)])
            if plan.awaits_masks:
                self._unbind_draws(drawn)
        for entry in drawn:
            self._state.expect(entry.row, entry.position)
        self._fly(Flight(plan.sequence, started_s, drawn, tokens_N, logprobs, prompts, self._stream.mark()))

    def deliver_results(self) -> None:
        """Deliver the results of the steps that are over. Never blocks."""
        self._watch.acknowledge()
        while self._flights and self._flights[0].mark.is_done():
            self._finish_oldest()

    def drain(self) -> None:
        """Deliver all results. Blocks until: all steps are over."""
        while self._flights:
            self._finish_oldest()

    def close(self) -> None:
        """End what waits for the device. Blocks until: it has done what was asked."""
        self._watch.close()

    @property
    def forward(self) -> None:
        """See `octavo.worker_proc.step.steps.Steps`."""
        return None

    @torch.inference_mode()
    def rest(self, comes_within: ComesWithin) -> None:
        """See `octavo.worker_proc.step.steps.Steps`: captures graphs, for which a step would have to wait."""
        while not self._flights and (sizes := self.runner.uncaptured) and not comes_within(IDLE_MS):
            self.runner.capture(sizes[0])

    def _apply(self, plan: StepPlan) -> None:
        """Bring both forms of the batch up to date."""
        self._state.apply(plan)
        states = [self._state.rows[admitted.slot].sampling for admitted in plan.admitted]
        widths = self._table.widths
        for state in states:
            widths = widths.holding(state)
        if widths != self._table.widths:
            self.runner.apply_changes()
            self._table = self._table.widened(widths)
            self.runner.replace_table(self._table)
        for admitted, state in zip(plan.admitted, states, strict=True):
            self._table.admit(admitted.slot, state, admitted.block_ids)
        for appended in plan.appended:
            num_blocks = self._state.rows[appended.slot].num_blocks
            self._table.append_blocks(appended.slot, num_blocks - len(appended.block_ids), appended.block_ids)

    def _bind_draws(self, plan: StepPlan, drawn: Sequence[Drawn], take_masks: TakeMasks) -> None:
        """Have the draws obey what depends on the tokens before: masks, and bad words of several tokens."""
        needs_tokens = [entry.row for entry in drawn if _needs_tokens(entry.row)]
        if not needs_tokens and not plan.awaits_masks:
            return
        self.drain()
        for row in needs_tokens:
            self._table.set_bad_ids(row.slot, row.sampling)
        if plan.awaits_masks:
            masks = take_masks()
            self._state.mask(masks)
            for slot, _ in masks:
                self._table.set_mask(slot, self._state.rows[slot].sampling.allowed_W)
        self.runner.apply_changes()

    def _unbind_draws(self, drawn: Sequence[Drawn]) -> None:
        """Have masks end with the draw that they were for."""
        for entry in drawn:
            state = entry.row.sampling
            if state.allowed_W is not state.always_allowed_W:
                self._table.set_mask(entry.row.slot, state.always_allowed_W)

    def _prompt_part(self, entry: Scheduled, row: Row, first: int) -> PromptPart | None:
        """Return the logprobs of the prompt tokens that follow an entry's positions, if there are any."""
        end = min(entry.start + entry.num_tokens + 1, row.num_prompt_tokens)
        token_ids = self._state.token_ids(row, entry.start + 1, end)
        if not token_ids:
            return None
        pieces = self._reporter.of_prompt(row.sampling.spec, token_ids, first)
        return PromptPart(row.slot, token_ids, row.sampling.spec.prompt_logprobs or 0, pieces)

    def _fly(self, flight: Flight) -> None:
        self._flights.append(flight)
        self._watch.expect(flight.mark)

    def _finish_oldest(self) -> None:
        """Wait for the oldest step, take its tokens into the batch and deliver its result."""
        flight = self._flights.popleft()
        flight.mark.wait()
        tokens: list[int] = [] if flight.tokens_N is None else flight.tokens_N.tolist()
        for entry, token_id in zip(flight.drawn, tokens, strict=True):
            self._state.settle(entry.row, entry.position, max(token_id, 0))
        end_s = time.perf_counter()
        elapsed_s = end_s - max(flight.started_s, self._last_end_s)
        self._last_end_s = end_s
        prompts = [(part.slot, _prompt_entries(part)) for part in flight.prompts]
        self._deliver(step_result(flight.sequence, tokens, _entries(flight, tokens), prompts, elapsed_s))


def _drawn(entry: Scheduled, row: Row) -> Drawn:
    return Drawn(row, entry.start + entry.num_tokens, row.sampling.spec.logprobs)


def _draw_rows(inputs: StepInputs, drawing: Sequence[int], drawn: Sequence[Drawn]) -> DrawRows:
    positions = np.array([entry.position for entry in drawn], dtype=np.int64)
    num_prompts = np.array([entry.row.num_prompt_tokens for entry in drawn], dtype=np.int64)
    rows_N = inputs.query_starts[1:][drawing] - 1
    return DrawRows(rows_N, inputs.slots_T[rows_N], positions, positions - num_prompts)


def _needs_tokens(row: Row) -> bool:
    """Return whether what a request may draw depends on the tokens that it has drawn."""
    return row.sampling.bad_words is not None and row.sampling.bad_words.depends_on_output


def _entries(flight: Flight, tokens: Sequence[int]) -> list[TokenLogprobs | None]:
    """Return an entry per draw; None where none was asked for, or there is no token."""
    entries: list[TokenLogprobs | None] = [None] * len(tokens)
    asked = [index for index, entry in enumerate(flight.drawn) if entry.num_top is not None]
    for place, index in enumerate(asked):
        if flight.logprobs is not None and tokens[index] != NO_TOKEN:
            entries[index] = token_logprobs(tokens[index], flight.logprobs.row(place, flight.drawn[index]))
    return entries


def _prompt_entries(part: PromptPart) -> list[TokenLogprobs]:
    rows = [(piece, index) for piece in part.logprobs for index in range(len(piece.chosen_R))]
    return [
        token_logprobs(token_id, piece.row(index, part.num_top))
        for token_id, (piece, index) in zip(part.token_ids, rows, strict=True)
    ]
