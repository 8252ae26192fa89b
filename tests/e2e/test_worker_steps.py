"""The worker's steps on a tiny model: the right tokens, and the same bits in any batch."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import Driver, alone, loaded, spec, worker_config

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled, StepPlan
from octavo.worker_proc.models.base import Model

NUM_STEPS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def config(directory: Path) -> ResolvedConfig:
    return worker_config(directory, max_num_seqs=4)


@pytest.fixture(scope="module")
def model(config: ResolvedConfig) -> Model:
    return loaded(config)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


SPECS: dict[str, SamplingSpec] = {
    "greedy": spec(logprobs=3),
    "plain": spec(temperature=1.0, seed=7, logprobs=0),
    "filtered": spec(temperature=0.7, seed=2**64 - 1, top_k=20, top_p=0.9, min_p=0.01, logprobs=5),
    "nucleus": spec(temperature=1.3, seed=11, top_p=0.8),
    "penalized": spec(
        temperature=0.9, seed=3, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=2
    ),
    "greedy penalized": spec(frequency_penalty=1.5, repetition_penalty=1.1),
    "biased": spec(temperature=1.0, seed=5, logit_bias=((17, 8.0), (18, -100.0)), prompt_logprobs=2),
    "allowed": spec(
        temperature=1.0, seed=6, allowed_token_ids=tuple(range(5, 60)), bad_words=((7,), (9, 10)), logprobs=1
    ),
    "processed": spec(temperature=0.8, seed=4, top_k=9, logprobs=3, logprobs_mode="processed_logprobs"),
    "min tokens": spec(temperature=1.0, seed=9, min_tokens=8, eos_token_ids=(4, 5), stop_token_ids=(6, 10**6)),
}


def test_greedy_tokens_equal_transformers(directory: Path, model: Model, config: ResolvedConfig) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for length in (1, 5, 40):
        expected = reference.generate(
            torch.tensor([prompt(length)]), max_new_tokens=NUM_STEPS, do_sample=False, eos_token_id=None
        )
        assert alone(model, config, prompt(length), spec(), NUM_STEPS).token_ids == expected[0].tolist()


def test_prompt_logprobs_equal_transformers(directory: Path, model: Model, config: ResolvedConfig) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = prompt(90)
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([tokens])).logits[0], -1)
    entries = alone(model, config, tokens, spec(prompt_logprobs=2), 1).prompt_logprobs
    assert len(entries) == len(tokens) - 1
    for position, entry in enumerate(entries):
        assert entry.token_ids[0] == tokens[position + 1]
        assert entry.token_ids[1:] == expected[position].topk(2).indices.tolist()
        assert entry.logprobs == pytest.approx(expected[position][entry.token_ids].tolist(), abs=1e-4)


def assert_same_bits_in_any_company(model: Model, config: ResolvedConfig, sampling: SamplingSpec) -> None:
    tokens = prompt(37, seed=1)
    expected = alone(model, config, tokens, sampling, NUM_STEPS)
    for num_others, chunk in [(0, 5), (1, 37), (3, 16), (6, 11)]:
        driver = Driver(model, config)
        for other in range(num_others):
            driver.admit(other, prompt(3 + 9 * other, seed=other), list(SPECS.values())[other])
        request = driver.admit(9, tokens, sampling)
        while not request.outputs:
            others = dict.fromkeys(range(num_others), 1)
            driver.step({**others, 9: min(chunk, len(tokens) - request.num_computed)})
        while len(request.outputs) < NUM_STEPS:
            if num_others and len(request.outputs) == 4:
                driver.release(0)
                driver.admit(0, prompt(20, seed=50), SPECS["filtered"])
            driver.step()
        assert request.outputs == expected.outputs
        assert request.logprobs == expected.logprobs
        assert request.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bits_in_any_batch_and_any_chunks(name: str, model: Model, config: ResolvedConfig) -> None:
    assert_same_bits_in_any_company(model, config, SPECS[name])


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("LlamaForCausalLM", "bfloat16"),
        ("Qwen3ForCausalLM", "bfloat16"),
        ("OPTForCausalLM", "float32"),
        ("GPT2LMHeadModel", "bfloat16"),
    ],
)
def test_the_same_bits_in_other_models_and_dtypes(arch: str, dtype: str, tmp_path: Path) -> None:
    config = worker_config(make_tiny(arch, tmp_path / "model", vocab_size=151 + 256), dtype=dtype)
    assert_same_bits_in_any_company(loaded(config), config, SPECS["filtered"])


@pytest.mark.parametrize("name", SPECS)
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(
    name: str, model: Model, config: ResolvedConfig
) -> None:
    tokens = prompt(21, seed=2)
    expected = alone(model, config, tokens, SPECS[name], NUM_STEPS)
    driver = Driver(model, config)
    driver.admit(0, tokens, SPECS[name])
    driver.admit(1, prompt(8), SPECS["plain"])
    driver.run(5)
    before = driver.release(0)
    driver.run(2)
    after = driver.admit(2, tokens, SPECS[name], outputs=before.outputs)
    driver.step({1: 1, 2: 19})
    driver.run(NUM_STEPS - 5)
    assert after.outputs == expected.outputs
    assert before.logprobs + after.logprobs == expected.logprobs


def test_decode_logprobs_equal_prefill_logprobs(model: Model, config: ResolvedConfig) -> None:
    generated = alone(model, config, prompt(20), spec(temperature=1.0, logprobs=4), NUM_STEPS)
    again = alone(model, config, generated.token_ids, spec(prompt_logprobs=4), 1)
    assert again.prompt_logprobs[19:] == generated.logprobs


def test_min_tokens_withholds_end_tokens(model: Model, config: ResolvedConfig) -> None:
    bias = ((4, 100.0), (6, 100.0))
    sampling = spec(min_tokens=3, eos_token_ids=(4,), stop_token_ids=(6,), logit_bias=bias)
    outputs = alone(model, config, prompt(5), sampling, 5).outputs
    assert not {4, 6} & set(outputs[:3])
    assert {4, 6} >= set(outputs[3:])


def test_released_slots_and_empty_steps(model: Model, config: ResolvedConfig) -> None:
    driver = Driver(model, config)
    driver.admit(0, prompt(5), spec())
    driver.step()
    driver.release(0)
    result = driver.step({})
    assert (result.sequence, list(result.token_ids), result.logprobs, result.prompt_logprobs) == (1, [], [], [])
    with pytest.raises(ProtocolError, match="empty"):
        driver.executor.execute(StepPlan(2, [], [], [], [Scheduled(0, 5, 1, 1)]))


def test_masks_bind_the_step_that_awaits_them(model: Model, config: ResolvedConfig) -> None:
    free = alone(model, config, prompt(5), spec(logprobs=0), 1)
    driver = Driver(model, config)
    words = bytearray(4 * -(-config.model.vocab_size // 32))
    words[9 // 8] |= 1 << 9 % 8
    admitted = [Admitted(slot, f"r{slot}", pack_ids(prompt(5)), 5, [[slot]], spec(logprobs=0)) for slot in (0, 1)]
    step = StepPlan(0, [], admitted, [], [Scheduled(slot, 0, 5, 1) for slot in (0, 1)], awaits_masks=True)
    result = driver.executor.execute(step, lambda: [(1, 0, bytes(words))])
    assert list(result.token_ids) == [free.outputs[0], 9]
    assert result.logprobs[0] == free.logprobs[0]
    again = StepPlan(1, [], [], [], [Scheduled(0, 5, 1, 1), Scheduled(1, 5, 1, 1)])
    assert driver.executor.execute(again).token_ids[1] != 9, "nothing awaits a mask, so there is none"
    for wrong, message in ((2, "slot 2, which is empty"), (0, "a mask of 4 bytes")):
        step = StepPlan(2, [], [], [], [Scheduled(0, 6, 1, 1)], awaits_masks=True)
        with pytest.raises(ProtocolError, match=message):
            driver.executor.execute(step, lambda slot=wrong: [(slot, 0, b"\0" * 4)])


def test_logprobs_are_of_the_unmodified_logits(model: Model, config: ResolvedConfig) -> None:
    plain = alone(model, config, prompt(5), spec(logprobs=3), 1).logprobs[0]
    biased = alone(model, config, prompt(5), spec(logprobs=3, logit_bias=((9, 100.0),)), 1).logprobs[0]
    assert plain is not None and biased is not None
    assert biased.token_ids[0] == 9
    assert (biased.token_ids[1:], biased.logprobs[1:]) == (plain.token_ids[1:], plain.logprobs[1:])
    assert plain.rank == 1 and plain.token_ids[0] == plain.token_ids[1]
