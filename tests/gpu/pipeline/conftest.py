"""Fixtures of the tests of whole steps: a tiny model on a GPU, or on the CPU with the interpreted kernels of GPUs."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_device import RowByRow, one_by_one
from gpu_steps import NUM_STEPS, SETTINGS, SPECS, new_stream, prompt
from tiny_models import make_tiny
from triton_interpreter import IS_INTERPRETING
from worker_plans import Running, alone, loaded, worker_config

from octavo import kernels
from octavo.kernels import dispatch, rope_store_kv
from octavo.kernels.linear import gpu as linear_gpu
from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs import sizes
from octavo.worker_proc.weights.load import load_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="session")
def config(directory: Path) -> ResolvedConfig:
    return worker_config(directory, device="cuda", **SETTINGS)


@pytest.fixture(scope="session")
def expected(directory: Path) -> dict[str, Running]:
    """What the CPU gives, each request alone."""
    on_cpu = worker_config(directory, **SETTINGS)
    model = loaded(on_cpu)
    return {name: alone(model, on_cpu, prompt(5), sampling, NUM_STEPS) for name, sampling in SPECS.items()}


@pytest.fixture(scope="module")
def computed_on_cpu() -> object:
    """What else the tests of a file need from the kernels of the CPU."""
    return None


@pytest.fixture(scope="module")
def _kernels_of_gpus(expected: dict[str, Running], computed_on_cpu: object) -> Iterator[None]:
    """In the interpreter the tensors of the CPU go to the kernels of GPUs, from here on."""
    patch = pytest.MonkeyPatch()
    if IS_INTERPRETING:
        original = dispatch.choose

        def choose(operation, implementations, device):
            return original(operation, implementations, torch.device("cuda"))

        # All are imported before one is patched: an import afterwards would keep the patch for ever.
        packages = [
            importlib.import_module(f"octavo.kernels.{name}") for _, name, _ in pkgutil.iter_modules(kernels.__path__)
        ]
        for package in packages:
            if hasattr(package, "choose"):
                patch.setattr(package, "choose", choose)
        patch.setitem(rope_store_kv._IMPLEMENTATIONS, "cuda", one_by_one)
        patch.setattr(linear_gpu, "new_packer", lambda **settings: RowByRow())
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model(config: ResolvedConfig, _kernels_of_gpus: None, device: torch.device) -> Model:
    return load_model(config, lambda fraction: None, device=device)


@pytest.fixture
def stream(device: torch.device) -> Stream:
    return new_stream(device)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of 8 tokens, and of 4 and 1 requests, unless a test says otherwise: the interpreter computes every row."""
    monkeypatch.setattr(sizes, "MAX_PROMPT_TOKENS", 8)
    monkeypatch.setattr(sizes, "_SMALL_DECODES", (1,))
