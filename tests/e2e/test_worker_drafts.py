"""Steps that verify drafts: the same tokens and logprob bits as one token at a time, whatever was drafted."""

import random
from pathlib import Path

import pytest
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import NUM_BLOCKS, Driver, HostExecutor, Running, alone, loaded, spec, worker_config

from octavo.kernels.token_mask import pack_mask
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Scheduled, StepPlan, TokenMask
from octavo.worker_proc.models.base import Model

NUM_TOKENS = 24

SPECS: dict[str, SamplingSpec] = {
    "greedy": spec(logprobs=3),
    "drawn": spec(temperature=0.9, seed=7, logprobs=0),
    "filtered": spec(temperature=0.7, seed=2**64 - 1, top_k=20, top_p=0.9, min_p=0.01, logprobs=5),
    "penalized": spec(
        temperature=0.9, seed=3, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=2
    ),
    "greedy penalized": spec(frequency_penalty=1.5, repetition_penalty=1.1),
    "bad words": spec(temperature=0.3, seed=6, bad_words=((7,), (9, 10), (21, 22, 23)), logprobs=1),
    "allowed": spec(temperature=1.0, seed=6, allowed_token_ids=tuple(range(5, 60)), logit_bias=((17, 4.0),)),
    "processed": spec(
        temperature=0.8, seed=4, top_k=9, frequency_penalty=0.5, logprobs=3, logprobs_mode="processed_logprobs"
    ),
    "min tokens": spec(temperature=1.0, seed=9, min_tokens=8, eos_token_ids=(4, 5), stop_token_ids=(6,), logprobs=1),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["native", "torch"])
def engine(request: pytest.FixtureRequest, directory: Path) -> tuple[Model, ResolvedConfig]:
    config = worker_config(directory, max_num_seqs=4, cpu_kernels=request.param)
    return loaded(config, is_native=request.param == "native"), config


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_rows_of_drafts_have_the_bits_of_one_row(directory: Path, settings: dict[str, str]) -> None:
    config = worker_config(directory, max_num_seqs=4, **settings)
    model = loaded(config)
    expected = expected_of(model, config, SPECS["filtered"], 2)
    driver = Driver(model, config)
    request = driver.admit(0, prompt(11, 2), SPECS["filtered"])
    driver.step()
    for num_draft_tokens in range(1, 6):
        done = len(request.outputs)
        result = driver.step(draft_tokens={0: expected.outputs[done : done + num_draft_tokens]})
        assert result.counts == [1 + num_draft_tokens]
    assert request.outputs == expected.outputs[: len(request.outputs)]
    assert request.logprobs == expected.logprobs[: len(request.outputs)]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def draft(rng: random.Random, expected: Running, request: Running) -> list[int]:
    """The tokens that follow, often with a wrong one among them; [] for no draft."""
    done = len(request.outputs)
    token_ids = expected.outputs[done : done + rng.randrange(7)]
    if token_ids and rng.random() < 0.6:
        token_ids[rng.randrange(len(token_ids))] = rng.randrange(VOCAB_SIZE)
    return token_ids


def decode(driver: Driver, pairs: dict[int, Running], rng: random.Random) -> None:
    """Decode with drafts until each request has as many outputs as the one it is compared with."""
    while any(len(driver.running[slot].outputs) < NUM_TOKENS for slot in pairs):
        draft_tokens = {}
        for slot, expected in pairs.items():
            request = driver.running[slot]
            if request.num_computed + 1 == len(request.token_ids) and (ids := draft(rng, expected, request)):
                draft_tokens[slot] = ids
        before = {slot: len(driver.running[slot].outputs) for slot in pairs}
        result = driver.step(draft_tokens=draft_tokens)
        for slot, expected in pairs.items():
            num_new = len(driver.running[slot].outputs) - before[slot]
            right = [a == b for a, b in zip(draft_tokens.get(slot, []), expected.outputs[before[slot] :], strict=False)]
            assert num_new == 1 + (right.index(False) if False in right else len(right))
        assert len(result.counts) == (len(driver.running) if draft_tokens else 0)


def expected_of(model: Model, config: ResolvedConfig, sampling: SamplingSpec, seed: int) -> Running:
    return alone(model, config, prompt(9 + seed, seed), sampling, NUM_TOKENS + 8)


def assert_same(request: Running, expected: Running) -> None:
    assert request.outputs[:NUM_TOKENS] == expected.outputs[:NUM_TOKENS]
    assert request.logprobs[:NUM_TOKENS] == expected.logprobs[:NUM_TOKENS]


@pytest.mark.parametrize("seed", range(2))
def test_drafts_change_no_bit(engine: tuple[Model, ResolvedConfig], seed: int) -> None:
    model, config = engine
    rng = random.Random(seed)
    names = list(SPECS)
    rng.shuffle(names)
    while names:
        some, names = names[:4], names[4:]
        driver, pairs = Driver(model, config), {}
        for slot, name in enumerate(some):
            pairs[slot] = expected_of(model, config, SPECS[name], slot)
            driver.admit(slot, prompt(9 + slot, slot), SPECS[name])
        decode(driver, pairs, rng)
        for slot, expected in pairs.items():
            assert_same(driver.running[slot], expected)


def test_more_samples_than_there_is_room_for_logits(engine: tuple[Model, ResolvedConfig]) -> None:
    model, config = engine
    executor = HostExecutor(model, config, NUM_BLOCKS)
    executor.pipelined.runner.max_logits = 4
    driver, pairs = Driver(model, config, executor), {}
    for slot, name in enumerate(["greedy", "drawn", "penalized"]):
        pairs[slot] = expected_of(model, config, SPECS[name], slot)
        driver.admit(slot, prompt(9 + slot, slot), SPECS[name])
    decode(driver, pairs, random.Random(5))
    for slot, expected in pairs.items():
        assert_same(driver.running[slot], expected)


def test_a_preempted_request_goes_on_after_a_wrong_draft(engine: tuple[Model, ResolvedConfig]) -> None:
    model, config = engine
    expected = expected_of(model, config, SPECS["penalized"], 1)
    driver = Driver(model, config)
    driver.admit(0, prompt(10, 1), SPECS["penalized"])
    driver.run(3)
    result = driver.step(draft_tokens={0: [expected.outputs[3], (expected.outputs[4] + 1) % VOCAB_SIZE, 5]})
    assert result.counts == [2]
    before = driver.release(0)
    after = driver.admit(0, prompt(10, 1), SPECS["penalized"], outputs=before.outputs)
    driver.step()
    driver.step(draft_tokens={0: expected.outputs[6:10]})
    assert after.outputs == expected.outputs[:11]
    assert before.logprobs + after.logprobs == expected.logprobs[:11]


def masks_of(slot: int, first: int, num_draws: int) -> list[TokenMask]:
    """Masks that allow some tokens, other ones for each output; none for every third."""
    chosen = [random.Random(first + index).sample(range(VOCAB_SIZE), 30) for index in range(num_draws)]
    words = [pack_mask(token_ids, VOCAB_SIZE).numpy().tobytes() for token_ids in chosen]
    return [(slot, index, each) for index, each in enumerate(words) if (first + index) % 3]


@pytest.mark.parametrize("name", ["filtered", "penalized", "allowed"])
def test_each_draw_has_its_own_mask(name: str, engine: tuple[Model, ResolvedConfig]) -> None:
    model, config = engine
    plain = Driver(model, config)
    expected = plain.admit(0, prompt(11, 2), SPECS[name])
    for index in range(NUM_TOKENS + 8):
        plain.step(masks=masks_of(0, index, 1))
    driver, rng = Driver(model, config), random.Random(3)
    request = driver.admit(0, prompt(11, 2), SPECS[name])
    driver.admit(1, prompt(4), SPECS["greedy"])
    driver.step(masks=masks_of(0, 0, 1))
    while len(request.outputs) < NUM_TOKENS:
        token_ids = draft(rng, expected, request)
        draft_tokens = {0: token_ids} if token_ids else {}
        driver.step(draft_tokens=draft_tokens, masks=masks_of(0, len(request.outputs), 1 + len(token_ids)))
    assert_same(request, expected)


@pytest.mark.parametrize("name", ["greedy", "penalized"])
def test_a_draw_where_nothing_may_come_is_left_out(name: str, engine: tuple[Model, ResolvedConfig]) -> None:
    model, config = engine
    plain = Driver(model, config)
    expected = plain.admit(0, prompt(11, 2), SPECS[name])
    for _ in range(8):
        plain.step()
    driver = Driver(model, config)
    request = driver.admit(0, prompt(11, 2), SPECS[name])
    driver.step()
    nothing = bytes(4 * -(-VOCAB_SIZE // 32))
    driver.step(draft_tokens={0: expected.outputs[1:5]}, masks=[(0, 3, nothing)])
    assert request.outputs == expected.outputs[:4]
    driver.step(draft_tokens={0: expected.outputs[4:6]})
    assert request.outputs == expected.outputs[:7]


@pytest.mark.parametrize(
    ("draft_tokens", "entry", "message"),
    [
        ([5, 6], Scheduled(0, 4, 2, 2), "positions|computes 2 tokens and samples after 2 of them, with 2 drafts"),
        ([5, 6], Scheduled(0, 3, 4, 2), "computes 4 tokens and samples after 2 of them, with 2 drafts"),
        ([], Scheduled(0, 4, 3, 3), "0 drafts came for slot 0"),
        ([5] * 2000, Scheduled(0, 4, 2001, 2001), "2000 drafts came for slot 0, which has 5 tokens"),
        (None, Scheduled(0, 4, 1, 2), "0 requests have drafts, but others sample after several positions"),
    ],
)
def test_drafts_that_cannot_be(
    draft_tokens: list[int] | None, entry: Scheduled, message: str, engine: tuple[Model, ResolvedConfig]
) -> None:
    driver = Driver(*engine)
    driver.admit(0, prompt(4), SPECS["greedy"])
    driver.step()
    packed = [] if draft_tokens is None else [(0, pack_ids(draft_tokens))]
    with pytest.raises(ProtocolError, match=message):
        driver.executor.execute(StepPlan(1, [], [], [], [entry], draft_tokens=packed))
    with pytest.raises(ProtocolError, match="slot 3, which is empty"):
        driver.executor.execute(StepPlan(1, [], [], [], [], draft_tokens=[(3, pack_ids([1]))]))
