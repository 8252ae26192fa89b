"""Drives a `PipelinedExecutor` as a core would: plans ahead of results, with tokens that are not known yet."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from worker_plans import Running, step_embeds

from octavo.protocol.adapters import NO_ADAPTER, AdapterLoad
from octavo.protocol.ids import pack_ids
from octavo.protocol.media import StepMedia
from octavo.protocol.params import SamplingSpec
from octavo.protocol.prompt_embeds import PromptEmbeds
from octavo.protocol.steps import NO_TOKEN, Admitted, Appended, Scheduled, StepPlan, StepResult, TokenMask
from octavo.worker_proc.executor.executor import PipelinedExecutor


class PipelineDriver:
    """Allocates blocks, plans steps, and receives the results.

    Blocks are allocated from the end and never contiguously, so that a wrong block table is detected. Each number
    stands for one block in each cache group, and for the state slot at the end of that block.
    """

    def __init__(
        self,
        build: Callable[[Callable[[StepResult], None]], PipelinedExecutor],
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        has_states: bool = False,
    ) -> None:
        self._num_groups, self._has_states = num_groups, has_states
        self.executor = build(self._take)
        self.results: list[StepResult] = []
        self.running: dict[int, Running] = {}
        self._block_size = block_size
        self._free_blocks = [*range(0, num_blocks, 2), *range(1, num_blocks, 2)]
        self._num_pending: dict[int, int] = {}
        """Number of tokens of each slot that are planned but not known yet."""
        self._plans: deque[list[tuple[Running, int]]] = deque()
        """For each step in flight: its entries, and the number of tokens that each draws."""
        self._sequence = 0
        self.adapter_loads: list[AdapterLoad] = []
        """Adapter loads of the next plan."""
        self._released: list[int] = []
        self._admitted: list[Running] = []

    def admit(
        self,
        slot: int,
        prompt: list[int],
        sampling: SamplingSpec,
        outputs: Iterable[int] = (),
        embeds: PromptEmbeds | None = None,
        adapter_slot: int = NO_ADAPTER,
    ) -> Running:
        """Add a request to the batch with the next step."""
        tokens = [*prompt, *outputs]
        request = Running(slot, sampling, len(prompt), tokens, embeds=embeds, adapter_slot=adapter_slot)
        self.running[slot] = request
        self._num_pending[slot] = 0
        self._admitted.append(request)
        return request

    def release(self, slot: int) -> Running:
        """Remove a request from the batch with the next step, even if it is in flight."""
        request = self.running.pop(slot)
        self._free_blocks += request.block_ids
        self._released.append(slot)
        return request

    def _admission(self, request: Running) -> Admitted:
        return Admitted(
            request.slot,
            "",
            pack_ids(request.token_ids),
            request.num_prompt_tokens,
            self._of_groups(request.block_ids),
            request.sampling,
            embed_spans=request.embeds.spans if request.embeds else [],
            adapter_slot=request.adapter_slot,
            grids=request.grids,
            both_ways_spans=request.both_ways_spans,
        )

    def _of_groups(self, blocks: list[int]) -> list[list[int]]:
        """Return the blocks of each cache group, which share no blocks. The last list has state slots."""
        groups = [[block * self._num_groups + group for block in blocks] for group in range(self._num_groups)]
        return [*groups, list(blocks)] if self._has_states else groups

    def num_uncomputed(self, slot: int) -> int:
        """Return the number of tokens that a step may compute, including tokens that are not known yet."""
        request = self.running[slot]
        return len(request.token_ids) + self._num_pending[slot] - request.num_computed

    def begin(
        self,
        chunks: dict[int, int] | None = None,
        masks: Callable[[], Sequence[TokenMask]] | None = None,
        draft_tokens: dict[int, list[int]] | None = None,
        media: StepMedia | None = None,
        num_drafts: int = 0,
    ) -> None:
        """Begin a step: `chunks` tokens of each slot (default: all), followed by `draft_tokens`.

        A slot with drafts must not be in the next step before this one has ended. `num_drafts`: see `StepPlan`.
        """
        draft_tokens = draft_tokens or {}
        if chunks is None:
            chunks = {slot: self.num_uncomputed(slot) for slot in self.running}
        new = {request.slot for request in self._admitted}
        appended, scheduled, entries = [], [], []
        for slot, num_tokens in chunks.items():
            request = self.running[slot]
            num_draft_tokens = len(draft_tokens.get(slot, ()))
            draws = int(num_tokens == self.num_uncomputed(slot)) + num_draft_tokens
            num_tokens += num_draft_tokens
            blocks = self._blocks_for(request, request.num_computed + num_tokens)
            if slot not in new and blocks:
                appended.append(Appended(slot, self._of_groups(blocks)))
            scheduled.append(Scheduled(slot, request.num_computed, num_tokens, draws))
            entries.append((request, draws))
            request.num_computed += num_tokens
            self._num_pending[slot] += draws
        admitted = [self._admission(request) for request in self._admitted]
        plan = StepPlan(
            self._sequence,
            self._released,
            admitted,
            appended,
            scheduled,
            masks is not None,
            prompt_embeds=step_embeds(self.running, scheduled),
            adapter_loads=self.adapter_loads,
            media=media,
            draft_tokens=[(slot, pack_ids(token_ids)) for slot, token_ids in draft_tokens.items()],
            num_drafts=num_drafts,
        )
        self._plans.append(entries)
        self._sequence += 1
        self._released, self._admitted, self.adapter_loads = [], [], []
        self.executor.begin(plan, masks or tuple)

    def run(self, num_steps: int) -> None:
        """Begin some steps, each with all available tokens, and wait for them."""
        for _ in range(num_steps):
            self.begin()
        self.executor.drain()

    def _blocks_for(self, request: Running, end: int) -> list[int]:
        num_missing = -(-end // self._block_size) - len(request.block_ids)
        blocks = [self._free_blocks.pop() for _ in range(num_missing)]
        request.block_ids += blocks
        return blocks

    def _take(self, result: StepResult) -> None:
        assert result.sequence == len(self.results), "results come in order"
        self.results.append(result)
        entries = self._plans.popleft()
        drawing = [(request, draws) for request, draws in entries if draws]
        counts = result.counts or [1] * len(drawing)
        for (request, draws), count in zip(drawing, counts, strict=True):
            request.num_computed -= draws - count
            if self.running.get(request.slot) is request:
                self._num_pending[request.slot] -= draws
        accepted = [request for (request, _), count in zip(drawing, counts, strict=True) for _ in range(count)]
        logprobs = result.logprobs or [None] * len(accepted)
        for request, token_id, entry in zip(accepted, result.token_ids, logprobs, strict=True):
            request.token_ids.append(max(token_id, 0))
            request.logprobs.append(entry)
            assert token_id != NO_TOKEN or entry is None
        for slot, prompt_logprobs in result.prompt_logprobs:
            next(request for request, _ in entries if request.slot == slot).prompt_logprobs += prompt_logprobs
