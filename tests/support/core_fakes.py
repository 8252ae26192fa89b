"""A worker without a model, and a small engine around the scheduler, for tests of the core.

The fake worker keeps rows and blocks as a real one does. Its "KV" at a position is a hash of all
tokens up to there, so whatever reads a wrong, stale or foreign block is caught where it happens.
"""

import hashlib
import itertools
import struct
from collections import deque
from dataclasses import dataclass, field

import msgspec

from octavo.core_proc import invariants
from octavo.core_proc.scheduler.scheduler import ClientEvent, Scheduler
from octavo.protocol.config import CachePlan, EngineConfig, ModelConfig, ModelFacts, ResolvedConfig, resolve
from octavo.protocol.events import Failed, Finished, TokenLogprobs, Tokens
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import Admitted, Scheduled, StepPlan, StepResult

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
        "max_num_queued_reqs": 0,
        "max_num_queued_tokens": 0,
    }
    return msgspec.structs.replace(base, **{**small, **changes})


def cache_plan(config: ResolvedConfig, num_blocks: int = 64) -> CachePlan:
    """Return a plan with this many blocks."""
    return CachePlan(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        kv_cache_bytes=num_blocks * 1000,
    )


@dataclass
class Row:
    """One slot of the fake worker's batch."""

    admitted: Admitted
    token_ids: list[int]
    block_ids: list[int]
    prefix_hashes: list[bytes] = field(default_factory=list)

    def prefix_hash(self, position: int) -> bytes:
        """Return the hash of all tokens up to and including `position`."""
        while len(self.prefix_hashes) <= position:
            parent = self.prefix_hashes[-1] if self.prefix_hashes else b""
            token = struct.pack("<I", self.token_ids[len(self.prefix_hashes)])
            self.prefix_hashes.append(hashlib.blake2b(parent + token, digest_size=8).digest())
        return self.prefix_hashes[position]


class FakeWorker:
    """Executes plans; every rule that a plan must keep is an assertion here."""

    def __init__(self, config: ResolvedConfig, num_blocks: int) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.rows: dict[int, Row] = {}
        self.next_sequence = 0
        self.num_computed_tokens = 0
        self._kv: dict[tuple[int, int], bytes] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply a plan and return its result."""
        assert plan.sequence == self.next_sequence
        self.next_sequence += 1
        for slot in plan.released:
            del self.rows[slot]
        for admitted in plan.admitted:
            assert admitted.slot not in self.rows
            assert 0 <= admitted.slot < self.config.max_num_seqs
            self.rows[admitted.slot] = Row(admitted, list(admitted.token_ids), list(admitted.block_ids))
        for appended in plan.appended:
            self.rows[appended.slot].block_ids += appended.block_ids
        self._check_budget(plan)
        # All KV of a step is written before any is read, as in every layer of a model.
        for part in plan.scheduled:
            self._write(part)
        for part in plan.scheduled:
            self._read(part)
        return self._sample(plan)

    def _check_budget(self, plan: StepPlan) -> None:
        num_tokens = sum(part.num_tokens for part in plan.scheduled)
        assert 0 < num_tokens <= self.config.max_num_batched_tokens
        assert len({part.slot for part in plan.scheduled}) == len(plan.scheduled) <= self.config.max_num_seqs
        self.num_computed_tokens += num_tokens

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        block_id = row.block_ids[position // self.config.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id, position % self.config.block_size

    def _write(self, part: Scheduled) -> None:
        row = self.rows[part.slot]
        for position in range(part.start, part.start + part.num_tokens):
            self._kv[self._place(row, position)] = row.prefix_hash(position)

    def _read(self, part: Scheduled) -> None:
        row, end = self.rows[part.slot], part.start + part.num_tokens
        for position in range(end):
            assert self._kv.get(self._place(row, position)) == row.prefix_hash(position), (
                f"{row.admitted.request_id} reads something foreign at position {position}"
            )
        assert part.samples == (end == len(row.token_ids))

    def _sample(self, plan: StepPlan) -> StepResult:
        sampled, logprobs = [], []
        for part in plan.scheduled:
            if part.samples:
                row = self.rows[part.slot]
                token_id = self._next_token(row)
                sampled.append(token_id)
                logprobs.append(_logprobs(row, token_id) if row.admitted.sampling.logprobs is not None else None)
        prompt_logprobs = [
            (part.slot, self._prompt_logprobs(part))
            for part in plan.scheduled
            if self.rows[part.slot].admitted.sampling.prompt_logprobs is not None
        ]
        for part, token_id in zip([part for part in plan.scheduled if part.samples], sampled, strict=True):
            self.rows[part.slot].token_ids.append(token_id)
        return StepResult(plan.sequence, sampled, logprobs if any(logprobs) else [], prompt_logprobs)

    def _next_token(self, row: Row) -> int:
        sampling, position = row.admitted.sampling, len(row.token_ids)
        seed = struct.pack("<QI", sampling.seed, position)
        digest = hashlib.blake2b(row.prefix_hash(position - 1) + seed, digest_size=8).digest()
        token_id = int.from_bytes(digest, "little") % VOCAB_SIZE
        num_outputs = position - row.admitted.num_prompt_tokens
        if num_outputs < sampling.min_tokens:
            while token_id in (*sampling.eos_token_ids, *sampling.stop_token_ids):
                token_id = (token_id + 1) % VOCAB_SIZE
        return token_id

    def _prompt_logprobs(self, part: Scheduled) -> list[TokenLogprobs]:
        row = self.rows[part.slot]
        end = min(part.start + part.num_tokens + 1, row.admitted.num_prompt_tokens)
        return [_logprobs(row, row.token_ids[position], position) for position in range(part.start + 1, end)]


def _logprobs(row: Row, token_id: int, position: int | None = None) -> TokenLogprobs:
    position = len(row.token_ids) if position is None else position
    value = -float(row.prefix_hash(position - 1)[0])
    return TokenLogprobs([token_id], [value], rank=1)


@dataclass
class Output:
    """What a client has been told of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    end: Finished | Failed | None = None


class FakeEngine:
    """A scheduler and a fake worker, run in lockstep; invariants are checked after every call."""

    def __init__(self, num_blocks: int = 64, **changes) -> None:
        self.config = core_config(**changes)
        self.scheduler = Scheduler(self.config, cache_plan(self.config, num_blocks), itertools.count(1.0).__next__)
        self.worker = FakeWorker(self.config, num_blocks)
        self.depth = 2 if self.config.async_scheduling else 1
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, Output] = {}
        self._results: deque[StepResult] = deque()

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
        return plan

    def commit(self) -> None:
        """Commit the oldest result."""
        self._take(self.scheduler.commit(self._results.popleft()))

    def turn(self) -> None:
        """Do what the core's loop does in one turn."""
        if len(self._results) == self.depth or self.plan() is None:
            self.commit()

    def run(self, max_turns: int = 10_000) -> None:
        """Run until every request has ended and every step is committed."""
        for _ in range(max_turns):
            if not self.scheduler.has_requests and not self._results:
                break
            self.turn()
        else:
            raise AssertionError("the engine does not come to an end")
        assert self.scheduler.cache.pool.num_free == self.scheduler.cache.pool.num_blocks
        assert len(self.scheduler.free_slots) == self.config.max_num_seqs
        assert all(output.end is not None for output in self.outputs.values())

    def scheduled_tokens(self) -> list[list[int]]:
        """Return the token counts of each plan's parts."""
        return [[part.num_tokens for part in plan.scheduled] for plan in self.plans]

    def _take(self, events: list[ClientEvent]) -> None:
        invariants.check(self.scheduler)
        for client, event in events:
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


def alone(prompt: list[int], max_tokens: int = 4, **fields) -> Output:
    """Return what a request gives on an engine of its own."""
    engine = FakeEngine(enable_prefix_caching=False, async_scheduling=False, max_model_len=1000, num_blocks=256)
    output = engine.submit("alone", prompt, max_tokens, **fields)
    engine.run()
    return output
