"""LoRA adapters in the steps of a device: the tokens of the CPU, through graphs, whatever adapters the others have."""

from pathlib import Path

import pytest
import torch
from gpu_steps import NUM_STEPS, SETTINGS, assert_equal, driver, prompt
from peft_adapters import load_of, write_adapter
from worker_plans import Driver, HostExecutor, Running, loaded, spec, worker_config

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.lora.loader import AdapterLoader, open_adapters
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

SPEC = spec(temperature=1.0, seed=7, logprobs=1, prompt_logprobs=1)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="session")
def config(directory: Path) -> ResolvedConfig:
    return worker_config(directory, device="cuda", **LORA, **SETTINGS)


@pytest.fixture(scope="session")
def adapters(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("adapters") / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        write_adapter(
            directory, path, seed, r=4 + seed, target_modules=["q_proj", "down_proj", "lm_head", "embed_tokens"]
        )
    return paths


@pytest.fixture(scope="module")
def computed_on_cpu(directory: Path, adapters: list[Path]) -> list[Running]:
    """A request with each adapter, and one without."""
    config = worker_config(directory, **LORA, **SETTINGS)
    model = loaded(config)
    loader = open_adapters(model, config)
    core = Driver(model, config, HostExecutor(model, config, 400, loader))
    core.adapter_loads = [load_of(path, slot) for slot, path in enumerate(adapters)]
    requests = [core.admit(slot, prompt(6), SPEC, adapter_slot=slot - 1) for slot in range(3)]
    core.run(NUM_STEPS)
    assert len({tuple(request.logprobs[0].logprobs) for request in requests}) == 3
    return requests


@pytest.fixture(scope="module")
def model_and_loader(
    config: ResolvedConfig, _kernels_of_gpus: None, device: torch.device
) -> tuple[Model, AdapterLoader]:
    model = load_model(config, lambda fraction: None, device=device)
    return model, open_adapters(model, config)


def test_the_tokens_of_the_cpu(
    model_and_loader: tuple[Model, AdapterLoader],
    config: ResolvedConfig,
    stream: Stream,
    adapters: list[Path],
    computed_on_cpu: list[Running],
) -> None:
    model, loader = model_and_loader
    core = driver(model, config, stream, adapters=loader)
    core.adapter_loads = [load_of(adapters[1], 0), load_of(adapters[0], 0), load_of(adapters[1], 1)]
    together = [core.admit(slot, prompt(6), SPEC, adapter_slot=slot - 1) for slot in range(3)]
    core.begin({0: 5, 1: 4, 2: 5})
    core.begin({0: 1, 1: 2, 2: 1})
    core.run(NUM_STEPS - 1)
    for request, expected in zip(together, computed_on_cpu, strict=True):
        assert_equal(request, expected)
    for slot in range(3):
        core.release(slot)
    alone = core.admit(3, prompt(6), SPEC, adapter_slot=0)
    core.run(NUM_STEPS)
    core.executor.close()
    num_tokens = len(alone.outputs)
    assert alone.outputs == together[1].outputs[:num_tokens]
    assert alone.logprobs == together[1].logprobs[:num_tokens]
