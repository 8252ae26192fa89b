"""A smaller model that drafts: the same tokens and bits as without it, and right drafts if it is the same model."""

import random
from pathlib import Path
from typing import Any

import pytest
from small_engine import Result, SmallEngine, TimedRequest
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import Driver, loaded, spec, worker_config

from octavo.frontend.engine_configs import read_config
from octavo.protocol.config.sources import engine_config
from octavo.protocol.errors import ConfigError
from octavo.protocol.stats import EngineStats

NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture, with weights of its own."""
    return make_tiny("Qwen2ForCausalLM", tmp_path_factory.mktemp("draft"), seed=1)


def drafting(draft: Path, **changes: Any) -> dict[str, Any]:
    fixed = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    return {"method": "draft_model", "model": str(draft), **fixed, **changes}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def run(
    target: Path, requests: list[TimedRequest], num_blocks: int, **settings: Any
) -> tuple[list[Result], EngineStats]:
    config = worker_config(target, max_model_len=128, **settings)
    is_native = settings.get("cpu_kernels") != "torch"
    engine = SmallEngine(loaded(config, is_native=is_native), config, num_blocks)
    return engine.run(requests), engine.scheduler.stats()


def storm(seed: int, count: int) -> list[TimedRequest]:
    """Requests that share a prefix, with all kinds of sampling."""
    rng = random.Random(seed)
    shared = prompt(20, seed=99)
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"temperature": 0.8, "seed": 5, "logprobs": 1},
        {"temperature": 1.1, "seed": 6, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    ]
    return [
        TimedRequest(
            shared[: rng.choice([0, 20])] + prompt(rng.randint(1, 40), seed=number),
            spec(**kinds[number % 3], max_tokens=rng.randint(1, 24)),
            arrives_at=rng.randint(0, 20),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3, "top_k": 40}])
def test_a_model_that_drafts_for_itself_is_always_right(target: Path, sampling: dict[str, Any], kernels: str) -> None:
    requests = [TimedRequest(prompt(9, seed=1), spec(max_tokens=40, **sampling))]
    got, stats = run(target, requests, 20, cpu_kernels=kernels, speculative_config=drafting(target))
    expected, _ = run(target, requests, 20, cpu_kernels=kernels)
    assert got == expected
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 25


def test_a_storm_has_the_bits_of_engines_without_a_draft_model(target: Path, other: Path) -> None:
    requests = storm(3, 14)
    common = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "block_size": 8}
    expected, _ = run(target, requests, 200, **common)
    got, stats = run(target, requests, 40, **common, speculative_config=drafting(other))
    assert got == expected
    assert 0 <= stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens


def test_every_draft_of_a_storm_is_right_if_the_model_is_the_same(target: Path) -> None:
    """Also after preemptions and prefix hits, whose keys the draft model shares."""
    requests = storm(4, 14)
    common = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "block_size": 8}
    expected, _ = run(target, requests, 200, **common)
    got, stats = run(target, requests, 40, **common, speculative_config=drafting(target))
    assert got == expected
    assert stats.spec_decode_num_draft_tokens > 50
    # Penalties count tokens that are known: a draft does not count the drafts before it.
    assert stats.spec_decode_num_accepted_tokens > 0.8 * stats.spec_decode_num_draft_tokens


def test_keys_that_lack_are_computed_when_drafts_are_wanted(target: Path) -> None:
    """After steps without drafts, in more tokens than a step holds, and in blocks that another request has filled."""
    config = worker_config(
        target, max_num_seqs=4, max_num_batched_tokens=16, block_size=8, speculative_config=drafting(target)
    )
    driver = Driver(loaded(config), config)
    request = driver.admit(0, prompt(41), spec())
    for start in range(0, 41, 16):
        driver.step(chunks={0: min(16, 41 - start)})
    for _ in range(9):
        assert not driver.step().drafts
    ((slot, drafts),) = driver.step(num_drafts=NUM_DRAFTS).drafts
    known = len(request.token_ids)
    for _ in range(NUM_DRAFTS):
        driver.step()
    assert (slot, list(drafts)) == (0, request.token_ids[known : known + NUM_DRAFTS])


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"quantization": "gguf"}, {}, "--quantization gguf"),
        ({"quantization": "int5"}, {}, "quantization"),
        ({"draft_tensor_parallel_size": 2}, {}, "draft_tensor_parallel_size is 2"),
        ({"method": "ngram", "model": None, "quantization": "int8"}, {}, "quantization is for method draft_model"),
        ({"model": None}, {}, "needs a smaller model"),
        ({"draft_tensor_parallel_size": 1}, {"tensor_parallel_size": 2}, "draft_tensor_parallel_size is 1"),
        ({}, {"pipeline_parallel_size": 2}, "across pipeline stages"),
        ({}, {"enable_prompt_embeds": True}, "may have embeddings or media"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    target: Path, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        loaded(worker_config(target, speculative_config=drafting(target, **changes), **settings))
    assert "speculative_config" in str(refused.value)


def test_draft_models_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    def start(draft: Path) -> None:
        read_config(engine_config({"model": str(target), "speculative_config": drafting(draft)}))

    with pytest.raises(ConfigError, match="vocab_size is 999, the model's is 320"):
        start(make_tiny("LlamaForCausalLM", tmp_path / "large", vocab_size=999))
    renamed = make_tiny("LlamaForCausalLM", tmp_path / "renamed")
    tokenizer = renamed / "tokenizer.json"
    text = tokenizer.read_text()
    start(renamed)
    first, second = '"!":', '"\\"":'
    assert first in text and second in text
    tokenizer.write_text(text.replace(first, '"@@":').replace(second, first).replace('"@@":', second))
    with pytest.raises(ConfigError, match=r"has id \d+ in the model, and \d+ in the draft model"):
        start(renamed)
