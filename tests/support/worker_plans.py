"""Drives an executor on the host with hand-made plans, as a core would, for tests of the worker alone."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from octavo.frontend.model_files.facts import read_head_facts, read_model_facts
from octavo.kernels.native import library
from octavo.protocol.adapters import NO_ADAPTER, AdapterLoad
from octavo.protocol.config import ResolvedConfig, resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import pack_ids
from octavo.protocol.media import GridSpan, StepMedia
from octavo.protocol.params import SamplingSpec
from octavo.protocol.prompt_embeds import PromptEmbeds, Span, StepEmbeds, StepEmbedsBuilder
from octavo.protocol.steps import Admitted, Appended, Scheduled, StepPlan, StepResult, TokenMask
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.executor.runner import ReceiveMasks
from octavo.worker_proc.lora.loader import AdapterLoader
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights.load import load_model

NUM_BLOCKS = 400


def worker_config(model: Path | str, **settings: Any) -> ResolvedConfig:
    """The configuration of a worker for a model on disk, in float32 by default."""
    said = engine_config({"model": str(model), "dtype": "float32", **settings})
    env = Env.read()
    facts = read_model_facts(said.model, env)
    head = read_head_facts(said, facts, env)
    return resolve(said, facts, device="cpu", num_cores=2, head=head)


def loaded(config: ResolvedConfig, *, is_native: bool = True) -> Model:
    """The configured model with its weights.

    One thread: on a busy machine, the barrier between two threads takes fifty times as long as a tiny model.
    """
    torch.set_num_threads(1)
    return load_model(config, lambda fraction: None, library=library.load() if is_native else None)


def spec(**changes: Any) -> SamplingSpec:
    """Greedy sampling, with changes."""
    return SamplingSpec(**{"max_tokens": 1000, "seed": 0, **changes})


@dataclass
class Running:
    """A request as a core would see it."""

    slot: int
    sampling: SamplingSpec
    num_prompt_tokens: int
    token_ids: list[int]
    """Prompt and outputs."""
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embeds: PromptEmbeds | None = None
    adapter_slot: int = NO_ADAPTER
    grids: list[GridSpan] = field(default_factory=list)
    both_ways_spans: list[Span] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


def step_embeds(running: dict[int, Running], scheduled: list[Scheduled]) -> StepEmbeds | None:
    """The prompt embeddings of a step."""
    builder = StepEmbedsBuilder()
    for entry in scheduled:
        if embeds := running[entry.slot].embeds:
            builder.add(entry.slot, embeds, entry.start, entry.start + entry.num_tokens)
    return builder.build()


def sampled_slots(plan: StepPlan, result: StepResult) -> list[int]:
    """The slot of each token of a result."""
    sampling = [entry.slot for entry in plan.scheduled if entry.num_samples]
    counts = result.counts or [1] * len(sampling)
    return [slot for slot, count in zip(sampling, counts, strict=True) for _ in range(count)]


class HostExecutor:
    """An executor whose device is the host: each plan gives its result at once."""

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        num_blocks: int,
        adapters: AdapterLoader | None = None,
        num_host_blocks: int = 0,
        num_host_states: int = 0,
    ) -> None:
        self._results: list[StepResult] = []
        self._begun: deque[tuple[StepPlan, ReceiveMasks]] = deque()
        self.pipelined = open_executor(
            model,
            config,
            None,
            self._results.append,
            num_blocks=num_blocks,
            num_states=num_blocks,
            num_host_blocks=num_host_blocks,
            num_host_states=num_host_states,
            max_model_len=config.max_model_len,
            adapters=adapters,
        )

    def execute(self, plan: StepPlan, receive_masks: ReceiveMasks = tuple) -> StepResult:
        """Return the result of a plan."""
        self.pipelined.begin(plan, receive_masks)
        (result,) = self._results
        self._results.clear()
        # A draft of a tiny model takes as long as its step, so an engine would soon ask for none.
        return msgspec.structs.replace(result, drafts_s=0.0)

    def begin(self, plan: StepPlan, receive_masks: ReceiveMasks) -> None:
        """Keep a plan for `take_result`: its masks come when those before are executed."""
        self._begun.append((plan, receive_masks))

    def take_result(self) -> StepResult:
        """Execute the oldest plan."""
        return self.execute(*self._begun.popleft())

    def use_model(self, model: Model) -> None:
        """Compute the next steps with other weights."""
        self.pipelined.use_model(model)


class Executes(Protocol):
    """What a driver asks of an executor."""

    def execute(self, plan: StepPlan, receive_masks: ReceiveMasks = tuple) -> StepResult: ...


class Driver:
    """A minimal core: hands out blocks, plans steps, keeps the results.

    Blocks are handed out from the end and never contiguously, so that a wrong block table is detected. Each stands for
    one of each cache group, and for the slot of the state at its end.
    """

    def __init__(self, model: Model, config: ResolvedConfig, executor: Executes | None = None) -> None:
        self.num_groups = len(model.cache_groups)
        self.has_states = model.state_group is not None
        self.executor = executor or HostExecutor(model, config, NUM_BLOCKS * max(1, self.num_groups))
        self.block_size = config.block_size
        self.free_blocks = [*range(0, NUM_BLOCKS, 2), *range(1, NUM_BLOCKS, 2)]
        self.running: dict[int, Running] = {}
        self.sequence = 0
        self._released: list[int] = []
        self.adapter_loads: list[AdapterLoad] = []
        """Of the next plan."""
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
        self._admitted.append(request)
        return request

    def release(self, slot: int) -> Running:
        """Remove a request from the batch with the next step."""
        request = self.running.pop(slot)
        self.free_blocks += request.block_ids
        self._released.append(slot)
        return request

    def step(
        self,
        chunks: dict[int, int] | None = None,
        draft_tokens: dict[int, list[int]] | None = None,
        masks: list[TokenMask] | None = None,
        num_drafts: int = 0,
        media: StepMedia | None = None,
        num_steps: int = 1,
    ) -> StepResult:
        """Run one step: `chunks` tokens of each slot, by default everything that is known; `draft_tokens` follow.

        With `num_steps` above 1 every request decodes as many tokens.
        """
        draft_tokens = draft_tokens or {}
        if chunks is None:
            chunks = {slot: len(r.token_ids) - r.num_computed + num_steps - 1 for slot, r in self.running.items()}
        chunks = {slot: num_tokens + len(draft_tokens.get(slot, ())) for slot, num_tokens in chunks.items()}
        appended, scheduled = [], []
        new = {request.slot: request for request in self._admitted}
        for slot, num_tokens in chunks.items():
            request = self.running[slot]
            end = request.num_computed + num_tokens
            needed = -(-end // self.block_size) - len(request.block_ids)
            blocks = [self.free_blocks.pop() for _ in range(needed)]
            request.block_ids += blocks
            if slot not in new and blocks:
                appended.append(Appended(slot, self._of_groups(blocks)))
            num_samples = 1 + len(draft_tokens[slot]) if slot in draft_tokens else int(end == len(request.token_ids))
            num_samples = num_steps if num_steps > 1 else num_samples
            scheduled.append(Scheduled(slot, request.num_computed, num_tokens, num_samples))
        plan = StepPlan(
            self.sequence,
            self._released,
            [self._admission(request) for request in self._admitted],
            appended,
            scheduled,
            prompt_embeds=step_embeds(self.running, scheduled),
            adapter_loads=self.adapter_loads,
            draft_tokens=[(slot, pack_ids(token_ids)) for slot, token_ids in draft_tokens.items()],
            awaits_masks=masks is not None,
            num_drafts=num_drafts,
            media=media,
            num_steps=num_steps,
        )
        self._released, self._admitted, self.adapter_loads = [], [], []
        self.sequence += 1
        result = self.executor.execute(plan, *([lambda: masks] if masks is not None else []))
        self._keep(plan, result)
        return result

    def _admission(self, request: Running) -> Admitted:
        return Admitted(
            request.slot,
            f"r{request.slot}",
            pack_ids(request.token_ids),
            request.num_prompt_tokens,
            self._of_groups(request.block_ids),
            request.sampling,
            embed_spans=request.embeds.spans if request.embeds else [],
            adapter_slot=request.adapter_slot,
            grids=request.grids,
            both_ways_spans=request.both_ways_spans,
        )

    def run(self, num_steps: int) -> None:
        """Run some steps of everything that is known."""
        for _ in range(num_steps):
            self.step()

    def _of_groups(self, blocks: list[int]) -> list[list[int]]:
        """Return the blocks of each cache group: no two groups share one. The last list is of slots of states."""
        groups = [[block * self.num_groups + group for block in blocks] for group in range(self.num_groups)]
        return [*groups, blocks] if self.has_states else groups

    def _keep(self, plan: StepPlan, result: StepResult) -> None:
        sampling = [entry for entry in plan.scheduled if entry.num_samples]
        counts = result.counts or [1] * len(sampling)
        for entry in plan.scheduled:
            self.running[entry.slot].num_computed += entry.num_tokens
        for entry, count in zip(sampling, counts, strict=True):
            self.running[entry.slot].num_computed -= entry.num_samples - count
        requests = [
            self.running[entry.slot] for entry, count in zip(sampling, counts, strict=True) for _ in range(count)
        ]
        logprobs = result.logprobs or [None] * len(requests)
        for request, token_id, reported in zip(requests, result.token_ids, logprobs, strict=True):
            request.token_ids.append(token_id)
            request.logprobs.append(reported)
        for slot, entries in result.prompt_logprobs:
            self.running[slot].prompt_logprobs += entries


def alone(model: Model, config: ResolvedConfig, prompt: list[int], sampling: SamplingSpec, num_steps: int) -> Running:
    """The result of a request that runs alone, its prompt computed in one chunk."""
    driver = Driver(model, config)
    request = driver.admit(0, prompt, sampling)
    driver.run(num_steps)
    return request
