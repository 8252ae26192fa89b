"""Plans of several decode steps: the tokens and logprobs of single steps, from workers and from whole engines."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_families import FAMILIES
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import NUM_BLOCKS, Driver, HostExecutor, Running, loaded, spec, worker_config

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.models.base import Model

SAMPLING = (
    spec(),
    spec(temperature=1.3, seed=11, top_p=0.8, logprobs=2),
    spec(temperature=0.9, seed=12, repetition_penalty=1.4, presence_penalty=0.5),
    spec(bad_words=((5,), (6, 7)), min_tokens=9, stop_token_ids=(6, 8)),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    return worker_config(make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny")), max_num_seqs=4)


@pytest.fixture(scope="module")
def model(config: ResolvedConfig) -> Model:
    return loaded(config)


def decoded(
    model: Model, config: ResolvedConfig, sampling: Sequence[SamplingSpec], steps: Sequence[int]
) -> list[Running]:
    """The requests after a step of their prompts and plans of so many decode steps."""
    driver = Driver(model, config)
    for slot, own in enumerate(sampling):
        prompt = [(7 * slot + 5 * place) % (VOCAB_SIZE - 3) + 3 for place in range(5 + 8 * slot)]
        driver.admit(slot, prompt, own)
    driver.step()
    for num_steps in steps:
        driver.step(num_steps=num_steps)
    return list(driver.running.values())


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("is_native", [True, False])
def test_tokens_and_logprobs_are_those_of_single_steps(
    model: Model, config: ResolvedConfig, num_requests: int, is_native: bool
) -> None:
    if not is_native:
        model = loaded(config, is_native=False)
    for sampling in (SAMPLING[:num_requests], SAMPLING[::-1][:num_requests]):
        single = decoded(model, config, sampling, [1] * 24)
        several = decoded(model, config, sampling, [1, 8, 2, 3, 1, 1, 8])
        for ours, theirs in zip(several, single, strict=True):
            assert ours.outputs == theirs.outputs
            assert ours.logprobs == theirs.logprobs


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid-dense", "qwen3-next"])
def test_recurrent_states_are_those_of_single_steps(name: str, tmp_path: Path) -> None:
    arch, class_name, settings = FAMILIES[name]
    config = worker_config(make_tiny(arch, tmp_path, class_name=class_name, **settings), max_num_seqs=4)
    model = loaded(config)
    single = decoded(model, config, SAMPLING[:3], [1] * 24)
    several = decoded(model, config, SAMPLING[:3], [1, 8, 2, 3, 1, 1, 8])
    for ours, theirs in zip(several, single, strict=True):
        assert (ours.outputs, ours.logprobs) == (theirs.outputs, theirs.logprobs)


def test_steps_end_with_the_last_request(model: Model, config: ResolvedConfig) -> None:
    (request,) = decoded(model, config, SAMPLING[:1], [1] * 20)
    position = next(place for place in range(3, 20) if request.outputs[place] not in request.outputs[:place])
    stop = request.outputs[position]
    # `position` decode steps follow the token of the prompt step, and the others are not made.
    (ended,) = decoded(model, config, [spec(stop_token_ids=(stop,))], [20])
    assert ended.outputs == request.outputs[: position + 1]
    (goes_on,) = decoded(model, config, [spec(stop_token_ids=(stop,), min_tokens=position + 1)], [position])
    assert len(goes_on.outputs) == position + 1
    both = decoded(model, config, [spec(eos_token_ids=(stop,)), spec()], [20])
    assert [len(one.outputs) for one in both] == [21, 21], "the other request needs all steps"


def test_a_waiting_command_ends_a_plan(model: Model, config: ResolvedConfig) -> None:
    (wanted,) = decoded(model, config, SAMPLING[:1], [1] * 12)
    executor = HostExecutor(model, config, NUM_BLOCKS)
    driver = Driver(model, config, executor)
    request = driver.admit(0, [(5 * place) % (VOCAB_SIZE - 3) + 3 for place in range(5)], SAMPLING[0])
    driver.step()
    looks = iter([False, False, True])
    executor.pipelined.has_command = lambda: next(looks)
    assert driver.step(num_steps=8).counts == [3]
    executor.pipelined.has_command = None
    assert driver.step(num_steps=9).counts == [9]
    assert request.outputs == wanted.outputs
