"""Determinism under random conditions from hypothesis: scheduler and model in one process, bits compared."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import write
from small_engine import Result, SmallEngine, TimedRequest
from tiny_families import FAMILIES
from tiny_models import MOE_ARCHITECTURES, make_tiny
from torch import Tensor
from worker_plans import loaded, worker_config

from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.frontend.generation.grammar import vocabulary_of
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.kernels.native.threads import ThreadPolicy
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.protocol.config import CacheGroupSpec, ResolvedConfig
from octavo.protocol.config.offloading import BLOCK_MULTIPLE
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.params import SamplingSpec
from octavo.protocol.structured import GrammarKind, GrammarSpec
from octavo.worker_proc.cache.groups import StateGroup
from octavo.worker_proc.cache.states import StateStorage
from octavo.worker_proc.cache.storage import KVStorage
from octavo.worker_proc.facts import cache_group_specs
from octavo.worker_proc.models.base import Model

MAX_LEN = 128
VOCAB = 320


MAX_THREADS = 3

CHECKPOINT_TOKENS = 12
"""Between two checkpoints of recurrent states, rounded up to whole blocks."""


class Case(NamedTuple):
    """A model, and how it is computed."""

    name: str
    arch: str
    changes: dict[str, Any]
    settings: dict[str, Any]
    is_native: bool = True
    quantized: str | None = None
    """What `quantized_checkpoints` makes of it."""


MIXED = (
    "Qwen3ForCausalLM",
    {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    {"dtype": "float32"},
)


def family(name: str) -> Case:
    """Return a case of `tiny_families`, or a mixture of experts."""
    arch, class_name, changes = FAMILIES.get(name, (name, None, {}))
    return Case(name, arch, {"class_name": class_name, **changes}, {"dtype": "float32"})


LLAMA = ("LlamaForCausalLM", {}, {"dtype": "bfloat16"})
CASES = [
    Case("windows", *MIXED),
    Case("bfloat16", *LLAMA),
    Case("float16", "GPT2LMHeadModel", {}, {"dtype": "float16"}),
    family("gemma2")._replace(settings={"dtype": "float32", "kv_cache_dtype": "fp8"}),
    family("Qwen2MoeForCausalLM"),
    family("mamba2"),
    Case(
        "quantized",
        "MistralForCausalLM",
        {"sliding_window": 24, "hidden_size": 96},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
        quantized="mixed",
    ),
    Case("windows-torch", *MIXED, is_native=False),
    Case("bfloat16-torch", *LLAMA, is_native=False),
]
"""Windows in some layers, in all and in none, both kinds of norm, learned and rotary positions, soft caps, experts,
recurrent states, every dtype, and a checkpoint of three quantized formats with an 8-bit cache, and
a cache of 8-bit floats. All through native
kernels, some through torch."""


GRAMMARS = [
    GrammarSpec(GrammarKind.REGEX, "(ab|[cd]e){1,6}"),
    GrammarSpec(GrammarKind.LARK, 'start: "x" start "y" | "z"'),
    GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"enum":[1,"two",null]},"maxItems":4}'),
    GrammarSpec(GrammarKind.LARK, 'start: "yes" | "no"', start_after=b"e"),
]


class Loaded(NamedTuple):
    """A model with its weights, the settings that it was loaded with, and the compiler for its vocabulary."""

    path: Path
    settings: dict[str, Any]
    weights: Model
    compiler: GrammarCompiler

    def config(self, **more: Any) -> ResolvedConfig:
        """The configuration of an engine of this model."""
        return worker_config(self.path, max_model_len=MAX_LEN, num_threads=MAX_THREADS, **self.settings, **more)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    case: Case = request.param
    path = make_tiny(case.arch, tmp_path_factory.mktemp("model"), **case.changes)
    if case.quantized:
        path, plain = path.with_name("quantized"), path
        write(case.quantized, plain, path)
    config = worker_config(path, max_model_len=MAX_LEN, **case.settings)
    compiler = GrammarCompiler(timeout_s=5)
    compiler.set_vocabulary(vocabulary_of(Tokenizer.load(path), VOCAB, config.model.eos_token_ids))
    yield Loaded(path, case.settings, loaded(config, is_native=case.is_native), compiler)
    compiler.close()


@pytest.fixture(scope="module", autouse=True)
def poisoned_cache() -> Iterator[None]:
    """Fill fresh caches with NaN: whoever reads a slot that nobody has written spoils its result."""
    make, allocate, make_states = KVStorage.__init__, CacheLayout.allocate, StateStorage.__init__

    def make_poisoned(self: KVStorage, **arguments: Any) -> None:
        make(self, **arguments)
        for layer in range(arguments["num_layers"]):
            for cache in self.layer(layer):
                cache.fill_(float("nan"))

    def allocate_poisoned(self: CacheLayout, *arguments: int) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = allocate(self, *arguments)
        return k_cache.fill_(0xFF), v_cache.fill_(0xFF)  # NaN in every float type, and in the factors of int8

    def make_poisoned_states(self: StateStorage, group: StateGroup, num_slots: int, device: torch.device) -> None:
        make_states(self, group, num_slots, device)
        for layer in group.layers:
            for state in self.layer(layer):
                state.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVStorage, "__init__", make_poisoned)
        patch.setattr(CacheLayout, "allocate", allocate_poisoned)
        patch.setattr(StateStorage, "__init__", make_poisoned_states)
        yield


SAMPLING = st.builds(
    SamplingSpec,
    max_tokens=st.integers(1, 30),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 7]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.02]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    min_tokens=st.integers(0, 3),
    eos_token_ids=st.sampled_from([(), (2,), tuple(range(0, VOCAB, 9))]),
    stop_token_ids=st.sampled_from([(), tuple(range(5, VOCAB, 40))]),
    logprobs=st.sampled_from([None, 0, 3]),
    logit_bias=st.sampled_from([(), ((7, 4.0), (300, -5.0))]),
    allowed_token_ids=st.sampled_from([(), (), (), tuple(range(3, VOCAB, 17))]),
    bad_words=st.sampled_from([(), (), ((7,), (9, 9), (20, 37, 54))]),
    logprobs_mode=st.sampled_from(["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]),
)


@st.composite
def timed_requests(draw: st.DrawFn) -> TimedRequest:
    """Draw a request; prompts share prefixes, and a fifth of the requests is aborted."""
    prefix = draw(st.sampled_from([[], [9] * 20, list(range(40))]))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50))
    sampling = draw(SAMPLING)
    wants_prompt_logprobs = draw(st.integers(0, 5)) == 0
    if wants_prompt_logprobs:
        values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        sampling = SamplingSpec(**{**values, "prompt_logprobs": 2, "skip_reading_prefix_cache": True})
    arrives_at = draw(st.integers(0, 12))
    aborted_at = arrives_at + draw(st.integers(0, 20)) if draw(st.integers(0, 4)) == 0 else None
    return TimedRequest(
        prefix + own,
        sampling,
        draw(st.integers(0, 2)),
        draw(st.sampled_from([None, "salt"])),
        arrives_at,
        aborted_at,
        draw(st.sampled_from([None, None, *GRAMMARS])),
    )


SPECULATIONS = [
    ResolvedSpeculation(method="ngram", max_depth=5, prompt_lookup_min=1, prompt_lookup_max=3),
    ResolvedSpeculation(method="grammar", max_depth=8),
]


ENGINES = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 16, 32, 256]),
        "max_num_seqs": st.integers(1, 9),
        "max_num_batched_tokens": st.sampled_from([9, 24, 64, 512]),
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
        "speculation": st.sampled_from([None, *SPECULATIONS]),
    }
)


STORMS: dict[str, st.SearchStrategy[Any]] = {
    "requests": st.lists(timed_requests(), min_size=1, max_size=10),
    "engine": ENGINES,
    "spare_tokens": st.sampled_from([0, 40, 2000]),
    "num_host_blocks": st.sampled_from([0, 3, 200]),
    "num_threads": st.lists(st.sampled_from([1, 1, 1, 2, MAX_THREADS]), min_size=1, max_size=4),
}


def groups_of(model: Loaded, config: ResolvedConfig) -> list[CacheGroupSpec]:
    """The cache groups, with checkpoints of states so close together that short requests leave some."""
    interval = -(-CHECKPOINT_TOKENS // config.block_size) * config.block_size
    return [
        msgspec.structs.replace(spec, window=interval) if spec.kind == "state" else spec
        for spec in cache_group_specs(model.weights, config)
    ]


def num_blocks_for(model: Loaded, config: ResolvedConfig, num_tokens: int) -> int:
    """The blocks of a request of this length; without any, slots for the states of a few requests."""
    num_blocks = CacheGroups.of(config, groups_of(model, config)).max_request_blocks(num_tokens)
    return num_blocks or num_tokens // 16


def alone(model: Loaded, request: TimedRequest) -> Result:
    """The request by itself, its prompt in one piece, one step at a time, on one thread."""
    config = model.config(
        max_num_seqs=1, max_num_batched_tokens=MAX_LEN, async_scheduling=False, enable_prefix_caching=False
    )
    num_blocks = num_blocks_for(model, config, MAX_LEN)
    engine = SmallEngine(model.weights, config, num_blocks, model.compiler, groups_of(model, config))
    (result,) = engine.run([TimedRequest(request.prompt, request.params, grammar=request.grammar)])
    return result


@pytest.mark.parametrize("model", [case for case in CASES if case.is_native], indirect=True, ids=lambda case: case.name)
@settings(max_examples=examples(10, 25), deadline=None)
@given(**STORMS)
def test_any_mix_of_requests_gives_the_tokens_of_each_request_alone(
    model: Loaded,
    requests: list[TimedRequest],
    engine: dict[str, Any],
    spare_tokens: int,
    num_host_blocks: int,
    num_threads: list[int],
) -> None:
    check(model, requests, engine, spare_tokens, num_host_blocks, num_threads)


@pytest.mark.parametrize(
    "model", [case for case in CASES if not case.is_native], indirect=True, ids=lambda case: case.name
)
@settings(max_examples=examples(4, 8), deadline=None)  # the torch path is slow, and only a reference and a fallback
@given(**STORMS)
def test_any_storm_through_torch(
    model: Loaded,
    requests: list[TimedRequest],
    engine: dict[str, Any],
    spare_tokens: int,
    num_host_blocks: int,
    num_threads: list[int],
) -> None:
    check(model, requests, engine, spare_tokens, num_host_blocks, num_threads)


@pytest.mark.long
@pytest.mark.parametrize(
    "model", [family(name) for name in (*FAMILIES, *MOE_ARCHITECTURES)], indirect=True, ids=lambda case: case.name
)
@settings(max_examples=10, deadline=None)
@given(**STORMS)
def test_any_storm_of_every_family(
    model: Loaded,
    requests: list[TimedRequest],
    engine: dict[str, Any],
    spare_tokens: int,
    num_host_blocks: int,
    num_threads: list[int],
) -> None:
    check(model, requests, engine, spare_tokens, num_host_blocks, num_threads)


def check(
    model: Loaded,
    requests: list[TimedRequest],
    settings: dict[str, Any],
    spare_tokens: int,
    num_host_blocks: int,
    num_threads: list[int],
) -> None:
    speculation = settings.pop("speculation")
    config = model.config(**settings)
    if speculation is not None:  # as in `resolve`, steps that verify drafts are single ones
        config = msgspec.structs.replace(config, speculation=speculation, num_scheduler_steps=1)
    num_blocks = num_blocks_for(model, config, MAX_LEN + spare_tokens)
    turns = itertools.cycle(num_threads)
    with pytest.MonkeyPatch.context() as patch:
        # So small a model is left to one thread otherwise.
        patch.setattr(ThreadPolicy, "choose", lambda policy, work: next(turns))
        groups = groups_of(model, config)
        if config.block_size % BLOCK_MULTIPLE:
            num_host_blocks = 0
        engine = SmallEngine(model.weights, config, num_blocks, model.compiler, groups, num_host_blocks)
        results = engine.run(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.end, "a request was lost"
        expected = alone(model, request)
        if result.end.startswith("abort"):
            length = len(result.token_ids)
            assert result.token_ids == expected.token_ids[:length]
            assert result.logprobs == expected.logprobs[: len(result.logprobs)]
            assert result.prompt_logprobs in (None, expected.prompt_logprobs)
        else:
            assert result == expected
