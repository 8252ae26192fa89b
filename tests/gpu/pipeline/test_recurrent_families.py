"""Steps of models with recurrent layers: what transformers computes, and the same bits in chunks and company."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from fake_device import MeasuredDevice
from gpu_steps import NUM_BLOCKS, NUM_STEPS, SETTINGS, DeviceExecutor, driver, prompt
from small_engine import Result, SmallEngine, TimedRequest
from tiny_families import FAMILIES
from tiny_models import make_tiny
from worker_plans import spec, worker_config

from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.facts import cache_group_specs
from octavo.worker_proc.runners.cuda_graphs import open as opening
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

FEWER_LAYERS = {
    "granite-hybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2-moe": {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_hidden_layers": 2},
    "qwen3-next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4},
    "falcon-h1": {"num_hidden_layers": 1},
    "nemotron-h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
}
PROMPT, SAMPLING = prompt(11, seed=1), spec(temperature=1.0, seed=7, logprobs=1)
SMALL = {**SETTINGS, "max_num_seqs": 2, "max_num_batched_tokens": 12}
LONG = FEWER_LAYERS.keys() - {"lfm2", "mamba2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FEWER_LAYERS]
)
def test_transformers_in_chunks_in_company_and_through_graphs(
    name: str, tmp_path: Path, _kernels_of_gpus: None, stream: Stream, device: torch.device
) -> None:
    arch, config_class, settings = FAMILIES[name]
    make_tiny(arch, tmp_path, class_name=config_class, **{**settings, **FEWER_LAYERS[name]})
    config = worker_config(tmp_path, device="cuda", **SMALL)
    model = load_model(config, lambda fraction: None, device=device)
    eager = driver(model, config, stream, has_graphs=False)
    alone = eager.admit(0, PROMPT, SAMPLING)
    eager.run(NUM_STEPS)
    eager.executor.close()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        logits_TV = theirs(torch.tensor([alone.token_ids[:-1]])).logits[0]
    expected = logits_TV.log_softmax(1)[range(len(PROMPT) - 1, len(logits_TV)), alone.outputs].tolist()
    assert [entry.logprobs[0] for entry in alone.logprobs] == pytest.approx(expected, abs=1e-4)
    core = driver(model, config, stream)
    core.admit(0, prompt(4), spec())
    request = core.admit(1, PROMPT, SAMPLING)
    core.begin({0: 4, 1: 3})  # a graph, with a row of padding
    core.begin({0: 1, 1: 8})  # a step without one
    core.run(NUM_STEPS - 1)  # decodes of two
    core.release(0)
    core.run(1)
    core.executor.close()
    assert request.outputs[:NUM_STEPS] == alone.outputs
    assert request.logprobs[:NUM_STEPS] == alone.logprobs


@pytest.mark.parametrize("name", ["lfm2", pytest.param("mamba2", marks=pytest.mark.long)])
def test_requests_continue_from_checkpoints_of_others(
    name: str, tmp_path: Path, _kernels_of_gpus: None, stream: Stream, device: torch.device
) -> None:
    arch, config_class, settings = FAMILIES[name]
    make_tiny(arch, tmp_path, class_name=config_class, **{**settings, **FEWER_LAYERS[name]})
    config = worker_config(tmp_path, device="cuda", **SMALL)
    model = load_model(config, lambda fraction: None, device=device)
    groups = [
        msgspec.structs.replace(one, window=4) if one.kind == "state" else one
        for one in cache_group_specs(model, config)
    ]
    sampling = spec(temperature=1.0, seed=7, logprobs=1, max_tokens=3)
    requests = [
        TimedRequest(PROMPT, sampling),
        TimedRequest([*PROMPT[:9], 5, 6], sampling, arrives_at=2),
        TimedRequest(PROMPT, sampling, arrives_at=9),
    ]

    def run(some: list[TimedRequest], *, caches: bool) -> tuple[list[Result], int]:
        chosen = msgspec.structs.replace(config, enable_prefix_caching=caches)
        on_device = DeviceExecutor(model, chosen, stream)
        engine = SmallEngine(model, chosen, NUM_BLOCKS, groups=groups, executor=on_device)
        found = engine.run(some)
        on_device.pipelined.close()
        return found, engine.scheduler.stats().prefix_cache_hits

    together, num_cached = run(requests, caches=True)
    assert num_cached == 8 + 8, "both of the others begin at the second checkpoint"
    alone = [run([replace(request, arrives_at=0)], caches=False)[0][0] for request in requests[:2]]
    assert together == [*alone, alone[0]]


def test_measured_steps_share_one_state(
    tmp_path: Path, _kernels_of_gpus: None, stream: Stream, device: torch.device
) -> None:
    arch, config_class, settings = FAMILIES["lfm2"]
    make_tiny(arch, tmp_path, class_name=config_class, **{**settings, **FEWER_LAYERS["lfm2"]})
    config = worker_config(tmp_path, device="cuda", **{**SMALL, "max_num_batched_tokens": 10, "max_model_len": 8})
    model = load_model(config, lambda fraction: None, device=device)
    cache_bytes = sum(one.block_bytes * (1 if one.kind == "state" else 4) for one in cache_group_specs(model, config))
    assert opening.measure(model, MeasuredDevice(stream), config).activation_bytes == 10**6 - cache_bytes
