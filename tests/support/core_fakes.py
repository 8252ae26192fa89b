"""A small engine around the scheduler and a worker without a model, for tests of the core."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from client_events import by_request
from simulation.worker import NUM_LANDING, ONE_GROUP, SimulatedWorker

from octavo.core_proc import invariants
from octavo.core_proc.block_transfers import BlockTransfers
from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.file_store import ContentWatch, FileStore
from octavo.core_proc.file_watch import FileChanges
from octavo.core_proc.scheduler.admission.admitter import MAX_COPIED_BYTES
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.hooks import StepHook
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.workers.commands import CombinedReply, MakeCommand, OnDone
from octavo.protocol.config import (
    CacheGroupSpec,
    CachePlan,
    EngineConfig,
    ModelConfig,
    ModelFacts,
    ResolvedConfig,
    resolve,
)
from octavo.protocol.events import Failed, Finished, TokenLogprobs, Tokens
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan, StepResult
from octavo.protocol.worker_commands import BlocksLoaded, LoadBlocks, StoreBlocks

VOCAB_SIZE = 50
CLIENT = b"client"


def core_config(**changes) -> ResolvedConfig:
    """Return the configuration of a small engine."""
    model = ModelFacts(
        model_path="/nowhere",
        tokenizer_path="/nowhere",
        load_format="dummy",
        architecture="LlamaForCausalLM",
        hf_config={},
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        checkpoint_dtype="float32",
        eos_token_ids=[0],
    )
    base = resolve(EngineConfig(model=ModelConfig(model="fake")), model, device="cpu", num_cores=1)
    small = {
        "max_model_len": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "full_step_tokens": 0,
        "decode_interval_tokens": 0,
        "step_time_target_s": 0.0,
        "num_scheduler_steps": 1,
        "max_num_queued_reqs": 0,
        "max_num_queued_tokens": 0,
    }
    return msgspec.structs.replace(base, **{**small, **changes})


def cache_plan(config: ResolvedConfig, num_blocks: int = 64, groups: Sequence[CacheGroupSpec] = ONE_GROUP) -> CachePlan:
    """Return a plan with this many blocks.

    The host memory size encodes test settings: thousands of bytes are the number of host blocks; the remainder is the
    number of them that a step may wait for (0: any number).
    """
    num_host_blocks, num_copied = divmod(config.kv_offloading_bytes, 1000)
    num_landing = NUM_LANDING if config.stores_blocks else 0
    return CachePlan(
        blocks_per_group=[num_blocks] * len(groups),
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        kv_cache_bytes=num_blocks * 1000,
        cache_groups=list(groups),
        max_request_states=state.max_held if (state := CacheGroups.of(config, groups).state) else 0,
        num_host_blocks=num_host_blocks,
        host_block_bytes=MAX_COPIED_BYTES // num_copied if num_copied else 1000,
        num_host_states=max(num_host_blocks, num_landing) if any(group.kind == "state" for group in groups) else 0,
        host_state_bytes=1000,
    )


class FakeWatch:
    """Reports only files that the worker writes; replaces `FileWatch`."""

    def __init__(self, files: dict[bytes, list[int | None]]) -> None:
        self.changes: list[FileChanges] = []
        self._files = files

    def fileno(self) -> int:
        return -1

    def take(self) -> list[FileChanges]:
        changes, self.changes = self.changes, []
        return changes

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._files.pop(key, None)

    def list_soon(self) -> None:
        self.changes.append(FileChanges(list(self._files), []))

    def note_written(self, num_bytes: int) -> None:
        assert num_bytes > 0


@dataclass
class Output:
    """What a client has received for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    end: Finished | Failed | None = None


class FakeEngine:
    """A scheduler and a fake worker, run in lockstep; invariants are checked after every call."""

    def __init__(
        self,
        num_blocks: int = 64,
        groups: Sequence[CacheGroupSpec] = ONE_GROUP,
        *,
        host_block_s: float = 0.0,
        watch: ContentWatch | None = None,
        **changes,
    ) -> None:
        self.config = core_config(**changes)
        copies_s = {"host_block_s": host_block_s, "host_state_s": host_block_s}  # a state has the size of a block
        plan = msgspec.structs.replace(cache_plan(self.config, num_blocks, groups), **copies_s)
        self.scheduler = Scheduler(self.config, plan, itertools.count(1.0).__next__)
        self.files: dict[bytes, list[int | None]] = {}
        """Contents of files, which outlive workers."""
        self._make_worker = partial(
            SimulatedWorker, self.config, num_blocks, groups, plan.num_host_blocks, files=self.files
        )
        self.worker = self._make_worker()
        self.depth = self.config.pipeline_parallel_size + self.config.async_scheduling
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, Output] = {}
        self._results: deque[StepResult] = deque()
        self.loads: deque[tuple[int, BlocksLoaded | None, OnDone]] = deque()
        """Pending loads and stores of the worker, the oldest first, each with the reply if there is one already."""
        self._numbers = itertools.count()
        self._transfers: list[StepHook] = [BlockTransfers(self.scheduler, self)]
        self.watch = FakeWatch(self.files)
        if self.config.kv_offloading_path:
            self._transfers.append(FileStore(self.scheduler, self, "files", watch or self.watch, 1000, 1000))

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 4, **fields) -> Output:
        """Queue a request; sampling fields and `Submit` fields alike."""
        own = {name: fields.pop(name) for name in Submit.__struct_fields__ if name in fields}
        sampling = SamplingSpec(max_tokens=max_tokens, seed=fields.pop("seed", 0), **fields)
        output = self.outputs[request_id] = Output()
        self._take(self.scheduler.submit(CLIENT, Submit(request_id, prompt, sampling, **own)))
        return output

    def abort(self, *request_ids: str) -> None:
        """Abort requests."""
        self._take(self.scheduler.abort(CLIENT, list(request_ids)))

    def plan(self) -> StepPlan | None:
        """Plan and hand the plan to the worker."""
        plan = self.scheduler.plan()
        invariants.check_plan(self.scheduler, plan)
        if plan is not None:
            self.plans.append(plan)
            self._results.append(self.worker.execute(plan))
        self._transfer()
        return plan

    def commit(self) -> None:
        """Commit the oldest result."""
        self._take(self.scheduler.commit(self._results.popleft()))
        self._transfer()

    def load_blocks(self, make: MakeCommand, on_done: OnDone) -> None:
        """See `LoadingWorkers`."""
        command, answer = make(next(self._numbers)), None
        if isinstance(command, StoreBlocks):
            answer = self.worker.store(command)
        elif isinstance(command, LoadBlocks):
            self.worker.begin_load(command)
        self.loads.append((command.sequence, answer, on_done))

    def finish_load(self) -> None:
        """Finish the oldest load or store."""
        sequence, answer, on_done = self.loads.popleft()
        answer = answer or self.worker.finish_load(sequence)
        on_done(CombinedReply(missing=set(answer.missing), missing_states=set(answer.missing_states)))
        invariants.check(self.scheduler)

    def _transfer(self) -> None:
        for hook in self._transfers:
            hook.on_step()

    def replace_worker(self) -> None:
        """Lose the worker with its steps in flight, and continue with a new one."""
        while self.loads:
            self.loads.popleft()[-1](CombinedReply("the worker is lost"))
        self.scheduler.lose_workers()
        invariants.check_loss(self.scheduler)
        self._results.clear()
        next_sequence, self.worker = self.worker.next_sequence, self._make_worker()
        self.worker.next_sequence = next_sequence

    def turn(self) -> None:
        """Run one iteration of the core's loop. Loads, if there are any, take as long as some steps."""
        if self.scheduler.may_plan(self.depth) and self.plan() is not None:
            return
        if self._results:
            self.commit()
        if self.loads and (not self._results or len(self.plans) % 3 == 0):
            self.finish_load()

    def run(self, max_turns: int = 10_000) -> None:
        """Run until every request has ended and every step is committed."""
        for _ in range(max_turns):
            if not self.scheduler.has_requests and not self._results and not self.loads:
                break
            self.turn()
        else:
            raise AssertionError("the engine does not finish")
        assert self.scheduler.cache.pool.num_free == self.scheduler.cache.pool.num_blocks
        assert len(self.scheduler.free_slots) == self.config.max_num_seqs
        assert all(output.end is not None for output in self.outputs.values())

    def scheduled_tokens(self) -> list[list[int]]:
        """Return the token counts of each plan's parts."""
        return [[part.num_tokens for part in plan.scheduled] for plan in self.plans]

    def _take(self, events: list[ClientEvent]) -> None:
        invariants.check(self.scheduler)
        for client, event in by_request(events):
            assert client == CLIENT
            output = self.outputs[event.request_id]
            assert output.end is None, "an event after the last one"
            match event:
                case Tokens():
                    output.token_ids += event.token_ids
                    output.logprobs += event.logprobs or []
                    output.num_cached_tokens = event.num_cached_tokens
                    if event.prompt_logprobs is not None:
                        assert output.prompt_logprobs is None
                        output.prompt_logprobs = event.prompt_logprobs
                case _:
                    output.end = event


class TimedEngine(FakeEngine):
    """An engine whose tokens take a fixed number of seconds according to its results; it uses no clock."""

    def __init__(self, seconds_per_token: float, **changes) -> None:
        super().__init__(**changes)
        self.seconds_per_token = seconds_per_token
        self.step_times_s: list[float] = []

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            elapsed_s = self.seconds_per_token * sum(chunk.num_tokens for chunk in plan.scheduled)
            self.step_times_s.append(elapsed_s)
            self._results[-1] = msgspec.structs.replace(self._results[-1], elapsed_s=elapsed_s)
        return plan


def alone(prompt: list[int], max_tokens: int = 4, **fields) -> Output:
    """Return the result of a request that runs alone."""
    engine = FakeEngine(enable_prefix_caching=False, async_scheduling=False, max_model_len=1000, num_blocks=256)
    output = engine.submit("alone", prompt, max_tokens, **fields)
    engine.run()
    return output
