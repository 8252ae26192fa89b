"""Prompt embeddings in the worker's steps: right, and with the same bits in any batch, chunks and runner."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny_families import FAMILIES
from tiny_hybrids import FAMILIES as HYBRIDS
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import Driver, Running, loaded, spec, worker_config

from octavo.protocol.buffers import Buffer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.ids import pack_ids
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds, StepEmbeds
from octavo.protocol.steps import Admitted, Scheduled, StepPlan
from octavo.worker_proc.models.base import Model

NUM_STEPS = 6
NAMES = ["LlamaForCausalLM", "gemma2", "OPTForCausalLM", "GPT2LMHeadModel", "granite", "falcon-h1"]
"""Gemma's and Falcon-H1's factors of embeddings are not applied to given rows, Granite's are."""


def tiny(name: str, root: Path) -> Path:
    arch, class_name, settings = {**FAMILIES, **HYBRIDS}.get(name, (name, None, {}))
    return make_tiny(arch, root / "model", class_name=class_name, **settings)


def embeds_of(rows_TD: torch.Tensor, position: int = 0) -> PromptEmbeds:
    return PromptEmbeds.pack([(position, len(rows_TD))], rows_TD.contiguous().view(torch.uint8).numpy().tobytes())


def run(model: Model, config: ResolvedConfig, embeds: PromptEmbeds, tail: list[int], chunk: int = 64) -> Running:
    """Sample after rows and the tokens behind them, beside two requests with tokens."""
    driver = Driver(model, config)
    for slot in (0, 1):
        driver.admit(slot, [7 + slot] * (3 + slot), spec(temperature=1.0, seed=slot))
    prompt = [PLACEHOLDER] * embeds.num_rows + tail
    request = driver.admit(2, prompt, spec(temperature=0.8, seed=3, logprobs=2, repetition_penalty=1.3), embeds=embeds)
    while not request.outputs:
        driver.step({0: 1, 1: 1, 2: min(chunk, len(prompt) - request.num_computed)} if chunk < 64 else None)
    driver.run(NUM_STEPS - 1)
    return request


@pytest.mark.parametrize("arch", NAMES)
@pytest.mark.parametrize("is_native", [True, False])
def test_rows_equal_transformers(arch: str, is_native: bool, tmp_path: Path) -> None:
    directory = tiny(arch, tmp_path)
    config = worker_config(directory, enable_prompt_embeds=True)
    model = loaded(config, is_native=is_native)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows_TD = torch.randn(21, config.model.embedding_width, generator=torch.Generator().manual_seed(0)) * 0.3
    driver = Driver(model, config)
    request = driver.admit(0, [PLACEHOLDER] * 21, spec(logprobs=4), embeds=embeds_of(rows_TD))
    driver.step()
    with torch.no_grad():
        expected = torch.log_softmax(reference(inputs_embeds=rows_TD[None]).logits[0, -1], -1)
    (entry,) = request.logprobs
    assert entry is not None
    assert request.outputs == [int(expected.argmax())]
    assert entry.logprobs == pytest.approx(expected[entry.token_ids].tolist(), abs=1e-4)


@pytest.mark.parametrize(("arch", "dtype"), [("LlamaForCausalLM", "bfloat16"), ("gemma2", "float32")])
def test_embeddings_of_tokens_give_the_bits_of_the_tokens(arch: str, dtype: str, tmp_path: Path) -> None:
    config = worker_config(tiny(arch, tmp_path), enable_prompt_embeds=True, dtype=dtype)
    model = loaded(config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=getattr(torch, config.dtype)
    )
    tokens = list(range(5, 42))
    with torch.no_grad():
        rows_TD = reference.get_input_embeddings()(torch.tensor(tokens))
    sampling = spec(temperature=0.8, seed=3, logprobs=2)
    driver = Driver(model, config)
    expected = driver.admit(0, tokens, sampling)
    driver.run(NUM_STEPS)
    for cut in (37, 20):
        driver = Driver(model, config)
        prompt = [PLACEHOLDER] * cut + tokens[cut:]
        actual = driver.admit(0, prompt, sampling, embeds=embeds_of(rows_TD[:cut]))
        driver.run(NUM_STEPS)
        assert (actual.outputs, actual.logprobs) == (expected.outputs, expected.logprobs)


def test_the_same_bits_in_any_chunks(tmp_path: Path) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), enable_prompt_embeds=True)
    model = loaded(config)
    rows_TD = torch.randn(29, config.model.embedding_width, generator=torch.Generator().manual_seed(1)) * 0.3
    whole = run(model, config, embeds_of(rows_TD), [9, 8, 7])
    for chunk in (1, 7, 30):
        part = run(model, config, embeds_of(rows_TD), [9, 8, 7], chunk)
        assert (part.outputs, part.logprobs) == (whole.outputs, whole.logprobs)
    assert run(model, config, embeds_of(rows_TD * 2), [9, 8, 7]).logprobs != whole.logprobs


def test_a_penalty_does_not_count_positions_without_tokens(tmp_path: Path) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), enable_prompt_embeds=True)
    model = loaded(config)
    rows_TD = torch.randn(5, config.model.embedding_width, generator=torch.Generator().manual_seed(1))
    (plain, penalized) = (Driver(model, config) for _ in range(2))
    every = tuple((token, 0.0) for token in range(VOCAB_SIZE))
    for driver, sampling in (
        (plain, spec(logprobs=4, logprobs_mode="processed_logprobs", logit_bias=every)),
        (penalized, spec(logprobs=4, logprobs_mode="processed_logprobs", repetition_penalty=5.0, logit_bias=every)),
    ):
        driver.admit(0, [PLACEHOLDER] * 5, sampling, embeds=embeds_of(rows_TD))
        driver.step()
    assert plain.running[0].logprobs == penalized.running[0].logprobs


def test_rows_that_do_not_fit_the_step_are_refused(tmp_path: Path) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), enable_prompt_embeds=True)
    driver = Driver(loaded(config), config)
    data = Buffer(bytes(4 * config.embedding_bytes))
    plan = StepPlan(
        0,
        [],
        [Admitted(0, "r", pack_ids([PLACEHOLDER] * 4), 4, [[0]], spec())],
        [],
        [Scheduled(0, 0, 3, 0)],
        prompt_embeds=StepEmbeds([(0, 0, 4)], data),
    )
    with pytest.raises(ProtocolError, match="4 embeddings came for position 0"):
        driver.executor.execute(plan)


def test_models_of_transformers_take_tokens_only(tmp_path: Path) -> None:
    config = worker_config(
        make_tiny("LlamaForCausalLM", tmp_path / "model"), enable_prompt_embeds=True, model_impl="transformers"
    )
    with pytest.raises(ConfigError, match="token ids only"):
        loaded(config)


def test_rows_of_a_step_must_fit_into_a_message(tmp_path: Path) -> None:
    directory = make_tiny("LlamaForCausalLM", tmp_path / "model")
    with pytest.raises(ConfigError, match="do not fit into one message") as found:
        worker_config(directory, enable_prompt_embeds=True, max_num_batched_tokens=2**24)
    assert "--max-num-batched-tokens" in (found.value.hint or "")
