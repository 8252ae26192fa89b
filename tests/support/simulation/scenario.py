"""The events of one run, drawn from its seed: the engine, the requests and their callers, the faults. Runs nothing.

Each seed first draws its own probabilities, so that some runs consist of one kind of request only: rare paths need such
extremes. A scenario is plain data, so it can be made smaller by removing items.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from core_fakes import core_config
from msgspec import structs

from octavo.core_proc.cache.groups import CacheGroups
from octavo.protocol.adapters import Adapter
from octavo.protocol.config import CacheGroupSpec, RecoveryConfig
from octavo.protocol.config.kv_transfer import ResolvedKVConnector
from octavo.protocol.config.lora import ResolvedLoRA
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.ids import IdArray, pack_ids
from octavo.protocol.params import PoolingSpec, SamplingSpec
from octavo.protocol.pooling import PoolingFacts, PoolingType
from octavo.protocol.prompt_embeds import PromptEmbeds
from octavo.protocol.requests import Submit
from simulation.grammar import Language, spec_of
from simulation.media import draw_media
from simulation.model import DAMAGED_MARK, SALT_MARK
from simulation.worker import ONE_GROUP

VOCAB_SIZE = 50

POISON_MARK = "!"
"""In a request's id: the worker that draws a token for it dies."""

CORE_POISON_MARK = "?"
"""The core dies as soon as it has planned to draw a token for the request."""

INTAKE_POISON_MARK = "%"
"""The core dies as soon as it handles the request."""

POISON_MARKS = (POISON_MARK, CORE_POISON_MARK, INTAKE_POISON_MARK)

SHARE_OF_POOLING = 0.15
"""Share of the scenarios whose requests ask for vectors; in half of them, prompts are computed whole."""

SHARE_OF_SPECULATION = 0.5
"""Share of the scenarios that draft tokens, among those whose models can take drafts back."""

SHARE_OF_FILES = 0.4
"""Share of the scenarios that keep KV blocks in files."""

SHARE_OF_CONNECTORS = 0.5
"""Share of these that keep them through a connector of the user's instead."""

SHARE_OF_STAGES = 0.5
"""Share of the scenarios of several ranks in which each of them is a pipeline stage."""
SHARE_OF_ALL = 0.15
"""Share of the faults that hit all engines at once."""

FaultKind: TypeAlias = Literal[
    "kill frontend",
    "cut connection",
    "kill core",
    "kill worker",
    "fail worker",
    "stop frontend",
    "stop core",
    "stop worker",
]


EngineFaultKind: TypeAlias = Literal["take engine out", "empty engine"]
"""Faults of several engines: one gets no new requests for a while; in the second case its requests move, too."""


@dataclass(frozen=True)
class Ask:
    """One request, and how its caller behaves."""

    frontend: int
    time: float
    submit: Submit
    leaves_after: int | None = None
    """Tokens after which the caller leaves; None: it reads to the end."""


@dataclass(frozen=True)
class Fault:
    """An injected fault."""

    kind: FaultKind | EngineFaultKind
    time: float
    target: int = 0
    """Index of the frontend, if the fault hits one."""
    engine: int | None = 0
    """Index of the engine, if the fault hits a core or its workers; None: all engines."""
    rank: int = 0
    """Of the worker, if the fault hits one."""
    num_operations: int = 0
    """Messages that the core still sends before it dies, so that it may die between any two messages."""
    duration: float = 0.0
    """How long a process is stopped, or the restart of a killed one takes."""


@dataclass(frozen=True)
class Scenario:
    """All events except the delays of messages, which also follow from the seed."""

    seed: int
    engine: dict[str, Any]
    """Changes to the configuration of a small engine (`core_fakes.core_config`)."""
    num_blocks: int
    num_frontends: int
    delay_scale: float
    """Typical delay of a message, in seconds."""
    step_scale: float
    """Typical duration of a step, in seconds."""
    queue_limit: int
    """Messages that a connection holds before its sender must wait."""
    max_backlog_events: int
    """The core drops a frontend with a larger backlog."""
    asks: list[Ask] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    drains: bool = False
    """The engines are told to stop while the last requests run."""
    num_ranks: int = 1
    """Workers of each engine."""
    num_engines: int = 1
    groups: Sequence[CacheGroupSpec] = ONE_GROUP
    """Of the cache."""
    max_files: int = 0
    """Of KV blocks, before some are deleted."""
    host_block_s: float = 0.0
    """See `CachePlan.host_block_s`."""


# long: one draw after another
def draw_scenario(seed: int, num_requests: int, num_kills: int, num_ranks: int = 1, num_engines: int = 1) -> Scenario:
    """Return the scenario of a seed. Ranks and engines change nothing but who is hit by a fault.

    In half of the scenarios ranks are stages: then steps in flight decode different requests.

    Args:
        seed: seed of everything.
        num_requests: how many requests there are.
        num_kills: how many faults there are.
        num_ranks: workers of each engine.
        num_engines: how many engines share the requests.
    """
    rng = random.Random(f"scenario {seed}")
    engine, num_blocks = _engine(rng)
    engine["pipeline_parallel_size"] = num_ranks if random.Random(f"stages {seed}").random() < SHARE_OF_STAGES else 1
    groups, num_blocks = _groups(random.Random(f"groups {seed}"), engine, num_blocks)
    storey = random.Random(f"second storey {seed}")
    engine["kv_offloading_path"] = "/files" if storey.random() < SHARE_OF_FILES else ""
    engine |= _connector(random.Random(f"connector {seed}"), has_files=bool(engine["kv_offloading_path"]))
    pooling = _pooling(random.Random(f"pooling {seed}"))
    if pooling is not None and not pooling.is_causal:
        groups, num_blocks = ONE_GROUP, _compute_whole(engine, num_blocks)
    engine["speculation"] = None if pooling else _speculation(random.Random(f"speculation {seed}"))
    engine["num_scheduler_steps"], plans = 1, random.Random(f"steps of a plan {seed}")
    if pooling is None and engine["speculation"] is None and engine["pipeline_parallel_size"] == 1:
        engine["num_scheduler_steps"] = plans.choice([1, 2, 3, 8, 8])
    # A plan has several steps while nobody waits.
    idle_factor = plans.choice([1, 1, 10]) if engine["num_scheduler_steps"] > 1 else 1
    num_frontends = rng.randint(1, 4)
    load = rng.choice([0.3, 1.0, 3.0, 30.0])
    duration = num_requests * (step_scale := 0.01) * idle_factor / load
    style = _Style(rng, engine["max_model_len"], seed)
    engine["lora"] = style.lora
    engine["enable_prompt_embeds"], engine["dtype"] = True, "float32"
    engine["model"] = structs.replace(core_config().model, hf_config={"hidden_size": 1}, pooling=pooling)
    times = sorted(rng.uniform(0, duration) for _ in range(num_requests))
    asks = [style.ask(index, rng.randrange(num_frontends), time) for index, time in enumerate(times)]
    if pooling is not None:
        asks = [replace(ask, submit=_pooled(ask.submit, engine["max_model_len"])) for ask in asks]
    if pooling is None and (give := draw_media(seed, engine, groups)) is not None:
        asks = [replace(ask, submit=give(ask.submit)) for ask in asks]
    kinds = rng.sample(list(FaultKind.__args__), rng.randint(1, len(FaultKind.__args__)))
    faults = [_fault(rng, rng.choice(kinds), num_frontends, duration, step_scale) for _ in range(num_kills)]
    victims = random.Random(f"victims {seed}")
    faults = [
        replace(
            fault,
            engine=None if victims.random() < SHARE_OF_ALL else victims.randrange(num_engines),
            rank=victims.randrange(num_ranks),
        )
        for fault in faults
    ]
    # Drafts and plans of several steps, which were drawn after the blocks, may need more of them.
    whole = CacheGroups.of(core_config(**engine), groups).max_request_blocks(engine["max_model_len"])
    num_blocks = max(num_blocks, whole)
    if num_engines > 1:
        faults += [_engine_fault(victims, num_engines, duration, step_scale) for _ in range(num_kills // 4)]
    return Scenario(
        seed=seed,
        engine=engine,
        num_blocks=num_blocks,
        groups=groups,
        num_frontends=num_frontends,
        delay_scale=rng.choice([0.0, 0.0005, 0.005, 0.05]),
        step_scale=step_scale,
        queue_limit=rng.choice([2, 8, 64, 1024]),
        max_backlog_events=rng.choice([10, 16384, 16384]),
        asks=asks,
        faults=sorted(faults, key=lambda fault: fault.time),
        drains=rng.random() < 0.2,
        num_ranks=num_ranks,
        num_engines=num_engines,
        max_files=storey.choice([5, 100, 10_000]),
        host_block_s=storey.choice([0.0, 0.0, 1e-6, 1e-3]),
    )


def _engine(rng: random.Random) -> tuple[dict[str, Any], int]:
    block_size = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.choice([40, 90, 128])
    smallest = -(-max_model_len // block_size)
    num_blocks = int(smallest * rng.choice([1, 1, 1.2, 2, 20])) + rng.randrange(3)
    engine = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rng.choice([1, 2, 4, 8, 32, 128]),
        "max_num_batched_tokens": rng.choice([1, 6, 16, 40, 128, 512]),
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 3, 20]),
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.8,
        "recovery": RecoveryConfig(execute_model_timeout=rng.choice([0.2, 300.0])),
        "max_num_queued_reqs": rng.choice([0, 0, 0, 0, 0, 0, 5, 50]),
        "max_num_queued_tokens": rng.choice([0, 0, 0, 0, 0, 0, 300]),
    }
    return engine, num_blocks


def _groups(rng: random.Random, engine: dict[str, Any], num_blocks: int) -> tuple[Sequence[CacheGroupSpec], int]:
    """Return the cache groups, and the number of blocks for as many requests as `num_blocks` of one group hold."""
    kinds = rng.choice([["full"], ["full"], ["window"], ["full", "window"], ["window", "full", "window", "chunk"]])
    kinds = rng.choice([kinds, kinds, [*kinds, "state"], ["state"]])
    sizes = {"full": [0], "state": [multiple * engine["block_size"] for multiple in (1, 3, 8)]}
    specs = [
        CacheGroupSpec(kind=kind, window=rng.choice(sizes.get(kind, [1, 5, 16, 50])), num_layers=1, block_bytes=1000)
        for kind in kinds
    ]
    groups = CacheGroups.of(core_config(**engine), specs)
    max_model_len = engine["max_model_len"]
    num_spare = num_blocks - -(-max_model_len // engine["block_size"])
    # Blocks of host memory, and how many a step may wait for: see `core_fakes.cache_plan`.
    engine["kv_offloading_bytes"] = 1000 * rng.choice([0, 1, 5, 40, 1000])
    if engine["kv_offloading_bytes"]:
        engine["kv_offloading_bytes"] += rng.choice([0, 1, 2])
    return specs, max(2, groups.max_request_blocks(max_model_len) + num_spare * len(specs))


def _fault(rng: random.Random, kind: FaultKind, num_frontends: int, duration: float, step_scale: float) -> Fault:
    return Fault(
        kind,
        time=rng.uniform(0, duration),
        target=rng.randrange(num_frontends),
        num_operations=rng.choice([0, 0, 1, 2, 3, 5, 8, 20]),
        duration=step_scale * rng.choice([0.1, 1, 10, 100]),
    )


def _engine_fault(rng: random.Random, num_engines: int, duration: float, step_scale: float) -> Fault:
    kind: EngineFaultKind = rng.choice(EngineFaultKind.__args__)
    pause = step_scale * rng.choice([0.1, 1, 10, 100])
    return Fault(kind, rng.uniform(0, duration), duration=pause, engine=rng.randrange(num_engines))


def _speculation(rng: random.Random) -> ResolvedSpeculation | None:
    if rng.random() >= SHARE_OF_SPECULATION:
        return None
    shortest = rng.randint(1, 3)
    return ResolvedSpeculation(
        method=rng.choice(["ngram", "suffix", "grammar", "eagle"]),
        max_depth=rng.choice([1, 3, 8, 20]),
        is_adaptive=rng.random() < 0.8,
        prompt_lookup_min=shortest,
        prompt_lookup_max=shortest + rng.randint(0, 3),
        suffix_max_cached_requests=rng.choice([0, 3, 100]),
    )


def _connector(rng: random.Random, *, has_files: bool) -> dict[str, Any]:
    """Return the settings of an engine whose files are replaced by a connector; {} if they are not."""
    if not has_files or rng.random() >= SHARE_OF_CONNECTORS:
        return {}
    role = rng.choice(["kv_both"] * 6 + ["kv_producer", "kv_consumer"])
    setting = ResolvedKVConnector(name="Simulated", module_path="", role=role)
    return {"kv_offloading_path": "", "kv_connector": setting, "enable_prefix_caching": True}


def _pooling(rng: random.Random) -> PoolingFacts | None:
    if rng.random() >= SHARE_OF_POOLING:
        return None
    return PoolingFacts(convert="embed", pooling="last", is_causal=rng.random() < 0.5)


def _compute_whole(engine: dict[str, Any], num_blocks: int) -> int:
    """Change an engine to one that computes prompts whole; returns enough blocks for it."""
    engine["enable_prefix_caching"], engine["long_prefill_token_threshold"] = False, 0
    engine["max_num_batched_tokens"] = max(engine["max_num_batched_tokens"], engine["max_model_len"])
    return max(num_blocks, -(-engine["max_model_len"] // engine["block_size"]))


def _pooled(submit: Submit, max_model_len: int) -> Submit:
    """Return the request for a vector of the same prompt, or of one that has all positions of the model."""
    rng = random.Random(submit.request_id)
    pooling: PoolingType = rng.choice(["last", "mean"])
    spec = PoolingSpec("embed", pooling, skip_reading_prefix_cache=pooling == "mean")
    token_ids = submit.prompt_token_ids
    if rng.random() < 0.05:
        token_ids = pack_ids(rng.choices(range(VOCAB_SIZE), k=max_model_len))
    return structs.replace(submit, prompt_token_ids=token_ids, params=spec, grammar=None, prompt_embeds=None)


def _adapter(index: int, rng: random.Random) -> Adapter:
    mark = DAMAGED_MARK if rng.random() < 0.1 else ""
    return Adapter(f"adapter {index}", f"{mark}{index}", f"/adapters/{index}", 8)


def _embeds(token_ids: IdArray, rng: random.Random) -> PromptEmbeds:
    """Return rows for one or two parts of a prompt, whose content is the token ids there."""
    length = len(token_ids)
    edges = sorted(rng.sample(range(length + 1), 4 if length >= 3 and rng.random() < 0.3 else 2))
    spans = [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return PromptEmbeds.pack(spans, b"".join([token_ids[start : start + num].tobytes() for start, num in spans]))


class _Style:
    """How the requests of one scenario are drawn."""

    def __init__(self, rng: random.Random, max_model_len: int, seed: int) -> None:
        self._rng = rng
        self._max_prompt = min(rng.choice([5, 20, 100]), max_model_len - 1) if rng.random() < 0.9 else max_model_len + 3
        self._max_tokens = rng.choice([1, 2, 4, 8, 20, 40])
        self._stems = [self._some_tokens(rng.choice([3, 16, 33, 60])) for _ in range(rng.randint(1, 5))]
        self._stem_share = rng.choice([0.0, 0.5, 0.9])
        self._leaving = rng.choice([0.0, 0.0, 0.1, 0.5])
        self._constrained = rng.choice([0.0, 0.0, 0.1, 0.9])
        self._poisoned = rng.choice([0.0] * 9 + [0.01])
        self._poisons = random.Random(f"poison {seed}")
        """A separate generator: poisoning a request changes nothing else in the run."""
        self._marks = self._poisons.choice([*([mark] for mark in POISON_MARKS), list(POISON_MARKS)])
        self._poisoned = self._poisons.choice([self._poisoned] * 9 + [0.05])
        self._adapting = random.Random(f"adapters {seed}")
        """Another one, for the same reason."""
        self._adapted = self._adapting.choice([0.0, 0.0, 0.5, 1.0])
        self._adapters = [_adapter(index, self._adapting) for index in range(self._adapting.randint(1, 6))]
        max_loras = self._adapting.randint(1, 4)
        self.lora = ResolvedLoRA(max_loras=max_loras, max_rank=8, max_cpu_loras=max_loras, dtype="float32")
        self._embedding = random.Random(f"embeds {seed}")
        self._embedded = self._embedding.choice([0.0, 0.0, 0.3])
        self._with_logprobs = rng.choice([0.0, 0.2])
        self._salts = rng.choice([[None], [None, "a", "b"]])
        self._intervals = rng.choice([[1], [1, 1, 3, 32]])
        self._languages = [
            Language(rng.randint(1, 4), rng.randrange(4), low := rng.randint(1, 4), low + rng.randint(0, 4))
            for _ in range(rng.randint(1, 6))
        ]

    def ask(self, index: int, frontend: int, time: float) -> Ask:
        """Draw a request."""
        rng = self._rng
        salt = rng.choice(self._salts)
        grammar = None
        if rng.random() < self._constrained:
            language = None if rng.random() < 0.02 else rng.choice(self._languages)
            grammar = spec_of(language, rng.choice([None, None, rng.randrange(VOCAB_SIZE)]))
        poison = self._poisons.choice(self._marks) if rng.random() < self._poisoned else ""
        submit = Submit(
            request_id=f"{index}{poison}{SALT_MARK}{salt or ''}",
            prompt_token_ids=pack_ids(self._prompt()),
            params=self._sampling(),
            priority=rng.randint(0, 2),
            cache_salt=salt,
            adapter=self._adapting.choice(self._adapters) if self._adapting.random() < self._adapted else None,
            stream_interval=rng.choice(self._intervals),
            grammar=grammar,
        )
        if self._embedding.random() < self._embedded and submit.params.prompt_logprobs is None:
            submit = structs.replace(submit, prompt_embeds=_embeds(submit.prompt_token_ids, self._embedding))
        leaves_after = rng.randint(0, self._max_tokens) if rng.random() < self._leaving else None
        return Ask(frontend, time, submit, leaves_after)

    def _prompt(self) -> list[int]:
        rng = self._rng
        length = rng.choice([rng.randint(1, 8), rng.randint(1, self._max_prompt)])
        if rng.random() >= self._stem_share:
            return self._some_tokens(length)
        stem = rng.choice(self._stems)
        return (stem[: rng.choice([len(stem), length])] + self._some_tokens(rng.randint(1, 8)))[: self._max_prompt]

    def _some_tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(VOCAB_SIZE), k=count)

    def _sampling(self) -> SamplingSpec:
        rng = self._rng
        has_prompt_logprobs = rng.random() < self._with_logprobs
        return SamplingSpec(
            max_tokens=rng.randint(1, self._max_tokens),
            seed=rng.randrange(3),
            min_tokens=rng.choice([0, 0, 0, 2]),
            eos_token_ids=rng.choice([(), (0,), (0, 1, 2, 3)]),
            stop_token_ids=rng.choice([(), (), (4, 5, 6)]),
            logprobs=0 if rng.random() < self._with_logprobs else None,
            prompt_logprobs=0 if has_prompt_logprobs else None,
            skip_reading_prefix_cache=has_prompt_logprobs or rng.random() < 0.05,
        )
