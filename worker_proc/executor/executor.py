"""Executes plans in order: applies each plan to the batch, has a runner compute it, and delivers the result.

Makes no decisions and sends nothing; the command loop in `worker` does that.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import SlotId, pack_ids
from octavo.protocol.steps import StepPlan, StepResult
from octavo.protocol.worker_commands import BlockFilesCommand, LoadBlocks, StoreBlocks
from octavo.worker_proc.batch.columns import Trait
from octavo.worker_proc.batch.inputs import Ints, MediaRows
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.block_files import BlockFiles
from octavo.worker_proc.cache.block_loader import BlockLoader, ContentStore
from octavo.worker_proc.cache.host_blocks import HostBlocks
from octavo.worker_proc.executor.in_flight import EventWatcher, InFlightStep
from octavo.worker_proc.executor.multi_step import MultiStep
from octavo.worker_proc.executor.prompt_chunks import prompt_chunks
from octavo.worker_proc.executor.repeated import RepeatedDecode
from octavo.worker_proc.executor.results import StepClock, step_result
from octavo.worker_proc.executor.rounds import draw_rounds
from octavo.worker_proc.executor.runner import (
    Accepted,
    Deliver,
    ReceiveMasks,
    Repeater,
    Runner,
    Samples,
    WaitForCommand,
)
from octavo.worker_proc.executor.step_drafts import StepDrafts
from octavo.worker_proc.lora.loader import AdapterLoader
from octavo.worker_proc.media.aligner import Aligner
from octavo.worker_proc.media.encoder import MediaEncoder, PendingVector
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.pooling.pooler import Pooler
from octavo.worker_proc.sampling.processors import Processors
from octavo.worker_proc.speculation.draws import Drafter


class PipelinedExecutor:
    """Runs plans on any device, with up to `max_in_flight` (of the runner) of them in flight.

    With `max_in_flight` 1, a step is over when `begin` returns. Otherwise the device computes asynchronously, and a
    file descriptor becomes readable when a step is over.

    Args:
        batch: the persistent batch, on the host.
        runner: computes the steps.
        deliver: takes the result of each plan, in order. Called from within the methods of the executor.
        processors: logits processors; `None` if the engine has none.
        adapters: fills the slots of LoRA adapters; `None` if the engine has none.
        pooler: makes vectors or scores of prompts; `None` if the engine generates tokens.
        host_blocks: keeps contents of blocks in host memory; `None` if the engine keeps none.
        host_states: keeps checkpoints of recurrent states in host memory; `None` if the engine keeps none.
        store: keeps blocks and states in files or elsewhere, through `host_blocks`; `None` if the engine has none.
        drafter: drafts tokens; `None` if the workers draft none.
        encoder: encodes media; `None` if this worker encodes none.
        aligner: aligns texts with audio; `None` if the model attends to no audio.
        repeater: the runner, if it can repeat steps whose arrays were changed in place; `None` if it cannot.
        is_last_stage: whether this is the last pipeline stage, which samples. Other stages read tokens in later plans.
    """

    def __init__(
        self,
        batch: BatchState,
        runner: Runner,
        deliver: Deliver,
        processors: Processors | None = None,
        adapters: AdapterLoader | None = None,
        pooler: Pooler | None = None,
        *,
        host_blocks: HostBlocks | None = None,
        host_states: HostBlocks | None = None,
        store: ContentStore | None = None,
        drafter: Drafter | None = None,
        encoder: MediaEncoder | None = None,
        aligner: Aligner | None = None,
        repeater: Repeater | None = None,
        is_last_stage: bool = True,
    ) -> None:
        self.runner = runner
        self._is_last_stage = is_last_stage
        self._processors = processors
        self._adapters = adapters
        self._pooler = pooler
        self._host_blocks, self._host_states = host_blocks, host_states
        self.loader = None if host_blocks is None else BlockLoader(host_blocks, store, host_states)
        """Fills blocks while steps run; `None` if there is no host memory for blocks."""
        self.drafter = drafter
        self._encoder, self._aligner = encoder, aligner
        self._batch = batch
        self._deliver = deliver
        # These act on every step; a repeated decode (`RepeatedDecode`) skips them.
        is_plain = all(part is None for part in (processors, pooler, drafter, aligner)) and is_last_stage
        self._repeater = repeater if is_plain else None
        self._repeated: RepeatedDecode | None = None
        self._multi_step: MultiStep | None = None
        """Multi-step plan in progress."""
        self._in_flight: deque[InFlightStep] = deque()
        self._clock = StepClock()
        self._drafts = StepDrafts(drafter, len(batch.columns.num_known_S), is_ahead=runner.max_in_flight > 1)
        self.has_command: Callable[[], bool] | None = None
        """Whether a command waits, which ends a plan of several steps; None: such plans are not interrupted."""
        self.block_files: BlockFiles | None = None
        """Exchanges blocks with other engines; `None` if the engine does not."""
        self._watcher = EventWatcher() if runner.max_in_flight > 1 else None

    @property
    def filenos(self) -> list[int]:
        """File descriptors that become readable when `deliver_results` or `loader` has work."""
        watched = [self._watcher, self.loader]
        return [one.fileno() for one in watched if one is not None]

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Do the work that would delay the first step. Return the number of captured graphs.

        Raises:
            RuntimeError: not enough memory.
        """
        if self._encoder is not None:
            self._encoder.warm_up()
        return self.runner.warm_up() + (self.drafter.warm_up() if self.drafter is not None else 0)

    @torch.inference_mode()
    def begin(self, plan: StepPlan, receive_masks: ReceiveMasks = tuple) -> None:
        """Compute a plan, or enqueue it on the device behind earlier plans.

        Args:
            plan: the step.
            receive_masks: waits for the step's masks and returns them. Called after all earlier results have been
                delivered, because the core builds the masks from them.

        Blocks until all earlier steps are over, if drafts will follow (`plan.num_drafts`), if a request of this step
            has a mask or a bad word of several tokens, or if the engine has logits processors. Also until this step is
            over, if the plan has several steps, or if the step verifies drafts of a draft model, or of a head with
            draws in rounds. Otherwise until fewer than `max_in_flight` steps are in flight.

        Raises:
            ProtocolError: the plan or the masks do not fit the batch.
        """
        if plan.num_steps == 1:
            self._begin(plan, receive_masks)
            return
        self.drain()
        multi_step = self._multi_step = MultiStep(plan, self._batch, self.has_command)
        for step in multi_step.steps():
            self._begin(step, receive_masks)
            self.drain()
        self._multi_step = None
        self._deliver(multi_step.result())

    def _begin(self, plan: StepPlan, receive_masks: ReceiveMasks) -> None:
        """Begin a plan of one step."""
        started_s = time.perf_counter()
        if self._repeater is not None and self._repeated is not None and self._repeated.try_advance(plan):
            self._repeat(self._repeater, self._repeated, plan, started_s)
            return
        self._repeated = None
        while len(self._in_flight) >= self.runner.max_in_flight:
            self._finish_oldest()
        adapter_faults = self._adapters.apply(plan.adapter_loads) if self._adapters and plan.adapter_loads else ()
        self._batch.apply(plan)
        if not self._is_last_stage:
            self._batch.take_sampled(plan.sampled)
        self._batch.add_drafts(plan)
        self._copy_blocks(plan)
        self.runner.on_plan(plan, self._batch)
        if self._processors is not None:
            for admitted in plan.admitted:
                self._processors.admit(self._batch.rows[admitted.slot])
        if plan.scheduled:
            step = self._compute(plan, receive_masks, started_s)
        else:
            self.runner.join_step()
            step = InFlightStep(plan.sequence, started_s, 0, None, None, (), self.runner.record_event())
        step.adapter_faults = adapter_faults
        self._in_flight.append(step)
        if self._watcher is not None:
            self._watcher.add(step.event)
        if self._watcher is None or (self.drafter is not None and step.drafts is None):
            self.drain()  # the drafter reads what the next step overwrites

    @torch.inference_mode()
    def transfer_blocks(self, command: LoadBlocks | StoreBlocks) -> None:
        """Begin to fill or store blocks; `loader` reports the end. Blocks until the immediate copies are made.

        Raises:
            ProtocolError: no host memory was allocated.
        """
        if self._host_blocks is None or self.loader is None:
            raise ProtocolError("blocks are to be copied through host memory, but no block of it was allocated")
        if isinstance(command, StoreBlocks):
            self.loader.store(command, self.runner.record_event)
        else:
            self._host_blocks.apply(command.copies_out, command.copies_in)
            self.loader.load(command, self.runner.record_event())

    @torch.inference_mode()
    def use_model(self, model: Model | None) -> None:
        """See `Runner.use_model`. No step may be in flight."""
        assert not self._in_flight, "a step computes with the present weights"
        self._repeated = None
        self.runner.use_model(model)
        if self.drafter is not None:
            self.drafter.use_model(model)
        if self._pooler is not None and model is not None:
            self._pooler.use_head(model.pooling_head)

    @torch.inference_mode()
    def exchange_files(self, command: BlockFilesCommand, rank: int) -> str:
        """See `BlockFiles.apply`. Blocks until all earlier steps are over.

        Raises:
            ProtocolError: the engine exchanges no blocks.
        """
        if self.block_files is None:
            raise ProtocolError("blocks are to be exchanged with another engine, but this one has no such role")
        self.drain()
        return self.block_files.apply(command, rank)

    def deliver_results(self) -> None:
        """Deliver the results of the steps that are over. Never blocks."""
        if self._watcher is not None:
            self._watcher.acknowledge()
        while self._in_flight and self._in_flight[0].event.is_done():
            self._finish_oldest()

    def drain(self) -> None:
        """Deliver all results. Blocks until all steps are over."""
        while self._in_flight:
            self._finish_oldest()

    def close(self) -> None:
        """End the threads. Blocks until the device is idle and all block loads are complete."""
        if self._watcher is not None:
            self._watcher.close()
        if self.loader is not None:
            self.loader.close()

    @torch.inference_mode()
    def on_idle(self, wait_for_command: WaitForCommand) -> None:
        """Prepare for later steps when no command has arrived for a moment. Stop as soon as one arrives."""
        if not self._in_flight:
            self.runner.on_idle(wait_for_command)
            for memory in (self._host_blocks, self._host_states):
                if memory is not None:
                    memory.on_idle(wait_for_command)

    def _repeat(self, repeater: Repeater, decode: RepeatedDecode, plan: StepPlan, started_s: float) -> None:
        """Compute a plan that continues the last one, and deliver its result."""
        token_ids = repeater.repeat(decode.samples).token_ids()
        decode.append(token_ids)
        times = self._clock.end_step(started_s, time.perf_counter())
        result = StepResult(plan.sequence, pack_ids(token_ids), [], [], elapsed_s=times.elapsed_s, idle_s=times.idle_s)
        self._end_plan(result, len(token_ids))

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.copies_out or plan.copies_in:
            if self._host_blocks is None:
                raise ProtocolError("a plan copies blocks to or from host memory, but no block of it was allocated")
            self._host_blocks.apply(plan.copies_out, plan.copies_in)
        if plan.state_copies_out or plan.state_copies_in:
            if self._host_states is None:
                raise ProtocolError("a plan copies states to or from host memory, but none was allocated there")
            self._host_states.apply(plan.state_copies_out, plan.state_copies_in)

    def _end_plan(self, result: StepResult, num_tokens: int) -> None:
        """Deliver the result of a step. For a multi-step plan, keep it for the result of the plan."""
        if self._multi_step is not None:
            self._multi_step.add(result)
        else:
            self._deliver(result)
        self.runner.after_step(num_tokens)

    def _compute(self, plan: StepPlan, receive_masks: ReceiveMasks, started_s: float) -> InFlightStep:
        batch = self._batch
        entries = batch.entries_of(plan.scheduled)
        media, vectors = self._encode_media(plan)
        inputs = batch.step_inputs(entries, plan.prompt_embeds, media)
        samples = Samples(entries, inputs, batch)
        alignments = None
        traits_R = batch.columns.traits_S[entries.slots_R]
        self.runner.run(inputs, samples)
        if self._aligner is not None and (traits_R & int(Trait.IS_ALIGNED)).any():
            alignments = self._aligner.align(plan.scheduled, inputs, batch)
        if not self._is_last_stage:
            samples.append_pending(batch)
            return InFlightStep(
                plan.sequence, started_s, len(inputs.token_ids_T), None, None, (), self.runner.record_event()
            )
        if self._pooler is not None:
            pooled = self._pooler.pool(plan.scheduled, inputs, batch, self.runner, vectors)
            batch.append_pending(samples.slots_N, samples.positions_N)
            num_tokens, event = len(inputs.token_ids_T), self.runner.record_event()
            return InFlightStep(plan.sequence, started_s, num_tokens, samples, pooled, (), event)
        reporting = (traits_R & int(Trait.REPORTS_PROMPT_LOGPROBS)).nonzero()[0].tolist()
        reported = [(plan.scheduled[place], int(inputs.query_starts[place])) for place in reporting]
        prompts = prompt_chunks(reported, batch, self.runner)
        output, rounds = None, None
        if len(samples):
            if plan.awaits_masks or (self._in_flight and self._needs_earlier_tokens(samples)):
                self.drain()
            if plan.awaits_masks:
                samples.exclude(self._batch.mask(receive_masks()))
            change_logits = None
            if self._processors is not None:
                change_logits = partial(self._change_logits, self._processors)
            rounds = draw_rounds(
                samples,
                batch,
                self.runner.max_logits,
                has_processors=self._processors is not None,
                masks_each_draw=self.runner.masks_each_draw,
            )
            if rounds is not None:
                self._drafts.fill_token_ids(samples)
            output = self.runner.sample(
                samples, has_masks=plan.awaits_masks, change_logits=change_logits, rounds=rounds
            )
            samples.append_pending(batch)
            if self._repeater is not None and not plan.awaits_masks:
                self._repeated = RepeatedDecode.of(plan, inputs, samples, batch)
        event = self.runner.record_event()
        faults = () if self._processors is None else self._processors.take_faults()
        num_tokens = int(inputs.query_starts[-1])
        step = InFlightStep(plan.sequence, started_s, num_tokens, samples, output, prompts, event, faults)
        step.alignments = alignments
        step.is_known_N = rounds.is_dependent_N if rounds else None
        step.entries, step.query_starts, step.num_drafts = entries, inputs.query_starts, plan.num_drafts
        step.reads_drafts = plan.awaits_masks  # the core cuts drafts of a request with a grammar
        self._drafts.begin(step, self.drain)
        return step

    def _encode_media(self, plan: StepPlan) -> tuple[MediaRows, dict[SlotId, PendingVector]]:
        """Return the media rows of a step, and the vectors of requests that are an image alone, by slot."""
        if plan.media is None or self._encoder is None:
            return (), {}
        rows = self._encoder.rows_of_step(plan.media)
        for slot, place in self._encoder.attended_places(plan.media):
            self._batch.columns.attended_S[slot] = place
        return rows, self._encoder.vectors_of_step(plan.media)

    def _needs_earlier_tokens(self, samples: Samples) -> bool:
        """Return whether the host must know all earlier tokens before this step samples."""
        return self._processors is not None or bool(samples.with_trait(Trait.HAS_LONG_BAD_WORDS | Trait.HAS_TIMESTAMPS))

    def _change_logits(self, processors: Processors, logits_RV: Tensor, samples: Samples) -> Tensor:
        return processors.apply(logits_RV, [sample.row for sample in samples], self._batch)

    def _finish_oldest(self) -> None:
        """Wait for the oldest step, put its tokens into the batch and deliver its result."""
        step = self._in_flight.popleft()
        step.event.wait()
        token_ids: list[int] = []
        accepted = None
        if step.samples is not None and step.output is not None:
            token_ids = step.output.token_ids()
            if step.alignments is not None:
                step.pooled = step.alignments.put_into(token_ids, step.samples)
            accepted = self._accept(step, step.samples, np.array(token_ids, dtype=np.int64))
        sampled_s = time.perf_counter()
        earlier, earlier_s = self._drafts.take()
        drafts = self._drafts.finish(step, accepted)
        is_drafting = self._drafts.are_pending
        times = self._clock.end_step(
            step.started_s, sampled_s, earlier_s, has_drafts=bool(drafts), is_drafting=is_drafting
        )
        self._end_plan(step_result(step, token_ids, times, accepted, drafts, earlier), step.num_tokens)

    def _accept(self, step: InFlightStep, samples: Samples, tokens_N: Ints) -> Accepted | None:
        """Put the tokens of a step into the batch. Return the accepted samples; `None` if all are."""
        batch, accepted = self._batch, None
        places: Any = slice(None)
        if samples.draft_tokens is not None:
            self._drafts.fill_token_ids(samples)
            accepted = samples.draft_tokens.accepted(tokens_N)
            places = accepted.places
            if step.is_known_N is not None:
                places = places[~step.is_known_N[places]]
        # A request without a token has failed, but its next step may already be planned.
        tokens_N = np.maximum(tokens_N, 0)
        batch.set_tokens(
            samples.slots_N[places], samples.positions_N[places], samples.admissions_N[places], tokens_N[places]
        )
        if samples.draft_tokens is not None:
            firsts = samples.draft_tokens.first_samples
            batch.end_drafts(samples.slots_N[firsts], samples.admissions_N[firsts])
        return accepted
