"""Determinism under everything hypothesis can think of: scheduler and model in one process, bits compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engine import Asked, Result, SmallEngine
from tiny_models import make_tiny
from torch import Tensor
from worker_plans import loaded, worker_config

from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.cache.storage import KVStorage
from octavo.worker_proc.models.base import Model

MAX_LEN = 128
VOCAB = 320


MODELS = [
    ("MistralForCausalLM", "float32", {"sliding_window": 24}),
    ("LlamaForCausalLM", "bfloat16", {}),
    ("GPT2LMHeadModel", "float16", {}),
]
"""Attention with and without a window, both kinds of norm and of positions, every dtype."""


CASES = [*((*model, True) for model in MODELS), *((*model, False) for model in MODELS[:2])]
"""All through native kernels, some through torch."""


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=[f"{arch}-{dtype}-{'native' if is_native else 'torch'}" for arch, dtype, _, is_native in CASES],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Model]:
    arch, dtype, changes, is_native = request.param
    path = make_tiny(arch, tmp_path_factory.mktemp("model"), **changes)
    return path, dtype, loaded(worker_config(path, dtype=dtype, max_model_len=MAX_LEN), is_native=is_native)


@pytest.fixture(scope="module", autouse=True)
def poisoned_cache() -> Iterator[None]:
    """Fill fresh caches with NaN: whoever reads a slot that nobody has written spoils its result."""
    make, allocate = KVStorage.__init__, CacheLayout.allocate

    def make_poisoned(self: KVStorage, **arguments: Any) -> None:
        make(self, **arguments)
        for layer in range(arguments["num_layers"]):
            for cache in self.layer(layer):
                cache.fill_(float("nan"))

    def allocate_poisoned(self: CacheLayout, num_blocks: int) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = allocate(self, num_blocks)
        return k_cache.fill_(0xFF), v_cache.fill_(0xFF)  # NaN in every float type

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVStorage, "__init__", make_poisoned)
        patch.setattr(CacheLayout, "allocate", allocate_poisoned)
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
)


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """A request; prompts share prefixes, and a fifth of the clients loses interest."""
    prefix = draw(st.sampled_from([[], [9] * 20, list(range(40))]))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50))
    sampling = draw(SAMPLING)
    wants_prompt_logprobs = draw(st.integers(0, 5)) == 0
    if wants_prompt_logprobs:
        values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        sampling = SamplingSpec(**{**values, "prompt_logprobs": 2, "skip_reading_prefix_cache": True})
    arrives_at = draw(st.integers(0, 12))
    aborted_at = arrives_at + draw(st.integers(0, 20)) if draw(st.integers(0, 4)) == 0 else None
    return Asked(
        prefix + own, sampling, draw(st.integers(0, 2)), draw(st.sampled_from([None, "salt"])), arrives_at, aborted_at
    )


ENGINES = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 4, 16, 32, 256]),
        "max_num_seqs": st.integers(1, 9),
        "max_num_batched_tokens": st.sampled_from([9, 24, 64, 512]),
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
    }
)


def alone(path: Path, dtype: str, model: Model, request: Asked) -> Result:
    """The request by itself, its prompt in one piece, one step at a time."""
    config = worker_config(
        path,
        dtype=dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_LEN,
        async_scheduling=False,
        enable_prefix_caching=False,
    )
    engine = SmallEngine(model, config, num_blocks=-(-MAX_LEN // config.block_size))
    (result,) = engine.run([Asked(request.prompt, request.sampling)])
    return result


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(asked(), min_size=1, max_size=10),
    engine=ENGINES,
    spare_tokens=st.sampled_from([0, 40, 2000]),
)
def test_any_storm_gives_what_each_request_gives_alone(
    model: tuple[Path, str, Model], requests: list[Asked], engine: dict[str, Any], spare_tokens: int
) -> None:
    path, dtype, weights = model
    config = worker_config(path, dtype=dtype, max_model_len=MAX_LEN, **engine)
    num_blocks = -(-(MAX_LEN + spare_tokens) // config.block_size)
    results = SmallEngine(weights, config, num_blocks).run(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.end, "a request was lost"
        expected = alone(path, dtype, weights, request)
        if result.end.startswith("abort"):
            length = len(result.token_ids)
            assert result.token_ids == expected.token_ids[:length]
            assert result.logprobs == expected.logprobs[: len(result.logprobs)]
            assert result.prompt_logprobs in (None, expected.prompt_logprobs)
        else:
            assert result == expected
