"""Decode steps that repeat: the tokens of steps whose arrays are built anew, whatever the model and the requests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peft_adapters import load_of, write_adapter
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import NUM_BLOCKS, Driver, HostExecutor, loaded, spec, worker_config

from octavo.protocol.adapters import NO_ADAPTER
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingSpec
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds
from octavo.protocol.steps import NO_TOKEN
from octavo.worker_proc.executor.repeated import RepeatedDecode
from octavo.worker_proc.lora.loader import open_adapters
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.host import HostRunner

NUM_STEPS = 24
NUCLEUS = spec(temperature=1.3, seed=11, top_p=0.8)
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention"],
}
Change = Callable[[Driver], object]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def config(directory: Path) -> ResolvedConfig:
    return worker_config(directory, max_num_seqs=4, enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def model(config: ResolvedConfig) -> Model:
    return loaded(config)


def prompt(slot: int) -> list[int]:
    return [(7 * slot + 5 * place) % (VOCAB_SIZE - 3) + 3 for place in range(5 + 8 * slot)]


def decode(driver: Driver, change: Change | None = None) -> list[list[int]]:
    """Return the outputs of all admitted requests, by slot; `change` comes before the second half of the steps."""
    requests = list(driver.running.values())
    driver.step()
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2 and change is not None:
            change(driver)
        driver.step()
    return [request.outputs for request in requests]


def admitted(model: Model, config: ResolvedConfig, sampling: Sequence[SamplingSpec] = (NUCLEUS,) * 3) -> Driver:
    driver = Driver(model, config)
    for slot, own in enumerate(sampling):
        driver.admit(slot, prompt(slot), own)
    return driver


def with_and_without(
    monkeypatch: pytest.MonkeyPatch, outputs: Callable[[], list[list[int]]]
) -> tuple[list[list[int]], set[int]]:
    """Return the outputs, which must be those without repeated steps, and the sizes of the repeated ones."""
    sizes: list[int] = []
    repeat = HostRunner.repeat
    with monkeypatch.context() as patch:
        patch.setattr(
            HostRunner, "repeat", lambda runner, samples: (sizes.append(len(samples)), repeat(runner, samples))[1]
        )
        repeated = outputs()
    # The others begin a block, or have other requests.
    assert NUM_STEPS // 2 < len(sizes) < NUM_STEPS
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedDecode, "try_advance", lambda decode, plan: False)
        assert outputs() == repeated
    return repeated, set(sizes)


def test_requests_that_leave(model: Model, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    _, sizes = with_and_without(monkeypatch, lambda: decode(admitted(model, config), lambda driver: driver.release(1)))
    assert sizes == {2, 3}


def test_layers_with_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = worker_config(make_tiny("Qwen3ForCausalLM", tmp_path / "model", **WINDOWS))
    model = loaded(config)
    assert len(model.cache_groups) == 2
    with_and_without(monkeypatch, lambda: decode(admitted(model, config)))


def test_min_tokens_that_end_between_repeated_steps(
    model: Model, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    likely = ((6, 100.0),)
    sampling = [spec(min_tokens=count, stop_token_ids=(6,), logit_bias=likely) for count in (3, 12, 20)]
    outputs, _ = with_and_without(monkeypatch, lambda: decode(admitted(model, config, sampling)))
    assert [tokens.index(6) for tokens in outputs] == [3, 12, 20]


def test_requests_without_a_token(model: Model, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a request whose rows are NaN go on until the core knows. They change nothing for the others."""
    rows = torch.full((4, 48), torch.nan)
    embeds = PromptEmbeds.pack([(0, len(rows))], rows.view(torch.uint8).numpy().tobytes())

    def outputs() -> list[list[int]]:
        driver = admitted(model, config)
        driver.admit(3, [PLACEHOLDER] * len(rows), NUCLEUS, embeds=embeds)
        return decode(driver, lambda driver: driver.release(3))

    (*others, failed), sizes = with_and_without(monkeypatch, outputs)
    assert sizes == {3, 4}
    assert set(failed) == {NO_TOKEN}
    assert others == decode(admitted(model, config))


def test_other_weights_between_repeated_steps(
    model: Model, config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = loaded(worker_config(make_tiny("LlamaForCausalLM", tmp_path / "other", seed=1)))

    def outputs() -> list[list[int]]:
        executor = HostExecutor(model, config, NUM_BLOCKS)
        driver = Driver(model, config, executor)
        for slot in range(3):
            driver.admit(slot, prompt(slot), NUCLEUS)
        return decode(driver, lambda _: executor.use_model(other))

    changed, _ = with_and_without(monkeypatch, outputs)
    same = decode(admitted(model, config))
    half = NUM_STEPS // 2 + 1
    for tokens, unchanged in zip(changed, same, strict=True):
        assert tokens[:half] == unchanged[:half]
        assert tokens != unchanged


def test_requests_with_adapters(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for seed, path in enumerate(paths):
        write_adapter(directory, path, seed)
    config = worker_config(directory, max_num_seqs=4, enable_lora=True, max_loras=2)
    model = loaded(config)

    def outputs(adapter_slots: Sequence[int]) -> list[list[int]]:
        driver = Driver(model, config, HostExecutor(model, config, NUM_BLOCKS, open_adapters(model, config)))
        driver.adapter_loads = [load_of(path, slot) for slot, path in enumerate(paths)]
        for slot, adapter_slot in enumerate(adapter_slots):
            driver.admit(slot, prompt(slot), NUCLEUS, adapter_slot=adapter_slot)
        return decode(driver)

    adapted, _ = with_and_without(monkeypatch, lambda: outputs((NO_ADAPTER, 0, 1)))
    plain = outputs((NO_ADAPTER, NO_ADAPTER, NO_ADAPTER))
    assert [ours == theirs for ours, theirs in zip(adapted, plain, strict=True)] == [True, False, False]
