"""Decoders that pool, against `transformers` on the same weights, and in batches that change nothing."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from small_engine import Result, SmallEngine, TimedRequest
from tiny_models import _LLAMA, ARCHITECTURES, VOCAB_SIZE, make_tiny
from torch import Tensor
from worker_plans import loaded, worker_config

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import PoolingFacts, PoolingType

EMBED = PoolingFacts(convert="embed", pooling="last")
NUM_LABELS = 3
POOLINGS: tuple[PoolingType, ...] = ("cls", "last", "mean", "all")
Floats = npt.NDArray[np.float32]


def config_of(model: Path, facts: PoolingFacts, **settings: Any) -> ResolvedConfig:
    config = worker_config(model, **settings)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, pooling=facts))


def spec(pooling: PoolingType, **changes: Any) -> PoolingSpec:
    task = "token_embed" if pooling == "all" else "embed"
    return PoolingSpec(**{"task": task, "pooling": pooling, "skip_reading_prefix_cache": pooling != "last", **changes})


def values_of(result: Result) -> Floats:
    assert result.vector is not None, result.end
    data, shape = result.vector
    return np.frombuffer(data, np.float32).reshape(shape)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def pooled(hidden_TD: Tensor, pooling: PoolingType) -> Floats:
    chosen = {"cls": hidden_TD[0], "last": hidden_TD[-1], "mean": hidden_TD.mean(0), "all": hidden_TD}[pooling]
    return torch.nn.functional.normalize(chosen, dim=-1).numpy()


def cosine_distance(a: Floats, b: Floats) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float((1 - (a * b).sum(-1) / lengths).max())


@torch.inference_mode()
def hidden_of(model: Path, prompt: list[int]) -> Tensor:
    reference = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    output: Tensor = reference(torch.tensor([prompt])).last_hidden_state[0]
    return output


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_embeddings_are_those_of_transformers(arch: str, kernels: str, tmp_path: Path) -> None:
    model = make_tiny(arch, tmp_path)
    settings = {} if kernels == "native" else {"cpu_kernels": "torch"}
    config = config_of(model, EMBED, max_num_batched_tokens=48, max_num_seqs=8, **settings)
    engine = SmallEngine(loaded(config, is_native=kernels == "native"), config, num_blocks=60)
    texts = prompts([1, 15, 70, 130])
    requests = [TimedRequest(text, spec(pooling)) for text in texts for pooling in POOLINGS]
    results = iter(engine.run(requests))
    for text in texts:
        hidden_TD = hidden_of(model, text)
        for pooling in POOLINGS:
            values = values_of(next(results))
            assert cosine_distance(values, pooled(hidden_TD, pooling)) < 1e-5, (arch, pooling)


def test_a_storm_changes_no_bit(tmp_path: Path) -> None:
    """Chunks, other requests, cached prefixes and preemptions."""
    model = make_tiny("Qwen3ForCausalLM", tmp_path)
    generator = random.Random(3)
    shared = prompts([64])[0]
    kinds = [spec("last"), spec("mean"), spec("all"), spec("last", dimensions=16), spec("last", use_activation=False)]
    requests = [
        TimedRequest(
            shared[: generator.choice([0, 32, 64])] + text, generator.choice(kinds), arrives_at=generator.randrange(20)
        )
        for text in prompts([generator.randrange(1, 150) for _ in range(30)], seed=4)
    ]
    alone_config = config_of(model, EMBED)
    weights = loaded(alone_config)
    alone = [SmallEngine(weights, alone_config, num_blocks=60).run([request])[0] for request in untimed(requests)]
    for budget, num_seqs, num_blocks in ((2048, 64, 400), (64, 8, 40), (17, 4, 20)):
        config = config_of(model, EMBED, max_num_batched_tokens=budget, max_num_seqs=num_seqs)
        engine = SmallEngine(weights, config, num_blocks=num_blocks)
        results = engine.run(requests)
        assert [result.vector for result in results] == [result.vector for result in alone]
    assert values_of(alone[0]).size


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_may_have_all_positions_and_be_divided(pooling: PoolingType, tmp_path: Path) -> None:
    model = make_tiny("Qwen3ForCausalLM", tmp_path)
    text = prompts([64])[0]
    vectors = []
    for budget in (64, 17):
        config = config_of(model, EMBED, max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=4)
        (result,) = SmallEngine(loaded(config), config, num_blocks=8).run([TimedRequest(text, spec(pooling))])
        vectors.append(result.vector)
    assert vectors[0] is not None and vectors[0] == vectors[1]


def untimed(requests: list[TimedRequest]) -> list[TimedRequest]:
    return [TimedRequest(request.prompt, request.params) for request in requests]


def test_a_cut_vector_is_the_beginning_normalized(tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path)
    config = config_of(model, EMBED)
    (text,) = prompts([40])
    specs = [spec("last", use_activation=False), spec("last", dimensions=16), spec("last")]
    engine = SmallEngine(loaded(config), config, num_blocks=40)
    plain, cut, whole = (values_of(result) for result in engine.run([TimedRequest(text, each) for each in specs]))
    np.testing.assert_allclose(cut, plain[:16] / np.linalg.norm(plain[:16]), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(whole), 1.0, rtol=1e-6)


@pytest.mark.parametrize("arch", ["Llama", "Qwen2", "Gemma2", "GPT2"])
def test_classifiers_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    settings = {**_LLAMA, "num_labels": NUM_LABELS, "pad_token_id": 0}
    if arch == "GPT2":
        settings = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 3, "num_labels": NUM_LABELS}
    facts = PoolingFacts(convert="classify", pooling="last", activation="softmax", num_labels=NUM_LABELS)
    texts = prompts([1, 15, 70])
    for kind, task, pooling in (("Sequence", "classify", "last"), ("Token", "token_classify", "all")):
        name = f"{arch}For{kind}Classification"
        model = make_tiny(name, tmp_path / kind, class_name=f"{arch}Config", **settings)
        config = config_of(model, facts, max_num_batched_tokens=32, max_num_seqs=8)
        engine = SmallEngine(loaded(config), config, num_blocks=40)
        scores = spec(pooling, task=task, skip_reading_prefix_cache=True, use_activation=False)
        shares = msgspec.structs.replace(scores, use_activation=True)
        reference = getattr(transformers, name).from_pretrained(model, dtype=torch.float32)
        results = engine.run([TimedRequest(text, each) for text in texts for each in (scores, shares)])
        for text, raw, soft in zip(texts, results[::2], results[1::2], strict=True):
            with torch.inference_mode():
                ids = torch.tensor([text])
                logits = reference(ids, attention_mask=torch.ones_like(ids)).logits[0]
            np.testing.assert_allclose(values_of(raw), logits.numpy(), atol=1e-4)
            np.testing.assert_allclose(values_of(soft), logits.softmax(-1).numpy(), atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_two_tokens_are_a_score(is_tied: bool, tmp_path: Path) -> None:
    """As Qwen3-Reranker's "no" and "yes"."""
    model = make_tiny("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=is_tied)
    facts = PoolingFacts(
        convert="classify", pooling="last", activation="sigmoid", num_labels=1, score_token_ids=(17, 200)
    )
    config = config_of(model, facts)
    (text,) = prompts([33])
    engine = SmallEngine(loaded(config), config, num_blocks=40)
    (result,) = engine.run([TimedRequest(text, PoolingSpec("classify"))])
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([text])).logits[0, -1, [17, 200]]
    np.testing.assert_allclose(values_of(result), logits.softmax(0)[1:].numpy(), atol=1e-5)


def test_steps_are_where_their_tag_is(tmp_path: Path) -> None:
    settings = {**_LLAMA, "num_labels": 2, "pad_token_id": 0}
    model = make_tiny("Qwen2ForTokenClassification", tmp_path, class_name="Qwen2Config", **settings)
    facts = PoolingFacts(convert="classify", pooling="step", token_pooling="step", num_labels=2)
    config = config_of(model, facts, max_num_batched_tokens=32, max_num_seqs=8)
    engine = SmallEngine(loaded(config), config, num_blocks=40)
    text = [5, 7, 9, 7] * 15 + [7]
    every = PoolingSpec("token_classify", "all", skip_reading_prefix_cache=True)
    tagged = msgspec.structs.replace(every, pooling="step", step_tag_id=7, returned_token_ids=(1,))
    never = msgspec.structs.replace(tagged, step_tag_id=8)
    results = [
        values_of(result) for result in engine.run([TimedRequest(text, each) for each in (every, tagged, never)])
    ]
    np.testing.assert_array_equal(results[1], results[0][np.flatnonzero(np.array(text) == 7), 1:])
    assert results[2].shape == (0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "classify"}, "has no task 'classify'"),
        ({"pooling": "all"}, "cannot be pooled by 'all'"),
        ({"pooling": "mean", "task": "embed"}, "hidden states of all tokens"),
        ({"segment_start": 3}, "segment_start"),
        ({"returned_token_ids": (0,)}, "returned_token_ids"),
        ({"dimensions": -1}, "dimensions"),
    ],
)
def test_what_cannot_be_computed_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path)
    config = config_of(model, EMBED)
    engine = SmallEngine(loaded(config), config, num_blocks=40)
    params = msgspec.structs.replace(spec("last"), **changes)
    (result,) = engine.run([TimedRequest([1, 2, 3, 4], params)])
    assert result.end.startswith("failed") and message in result.end
