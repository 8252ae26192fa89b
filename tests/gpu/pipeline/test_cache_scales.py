"""Scales of keys and values that are measured at the start: on a GPU the same as on a CPU."""

from pathlib import Path

import pytest
import torch
from gpu_steps import SETTINGS
from tiny_models import make_tiny
from worker_plans import loaded, worker_config

from octavo.worker_proc.cache_calibration import measure_cache_scales
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.weights.cache_scales import CacheScales
from octavo.worker_proc.weights.load import load_model

pytestmark = pytest.mark.xdist_group("pipeline")

MEASURED = {
    **SETTINGS,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "calculate_kv_scales": True,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def on_cpu(model_path: Path) -> CacheScales:
    config = worker_config(model_path, **MEASURED)
    return measure_cache_scales(loaded(config), config, None)


def test_scales_are_measured_as_on_a_cpu(
    model_path: Path, on_cpu: CacheScales, _kernels_of_gpus: None, stream: Stream, device: torch.device
) -> None:
    config = worker_config(model_path, device="cuda", **MEASURED)
    model = load_model(config, lambda fraction: None, device=device)
    assert measure_cache_scales(model, config, stream) == on_cpu
