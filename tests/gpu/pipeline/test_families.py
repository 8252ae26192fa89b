"""Steps of models with what Llama lacks, through graphs: the tokens of the CPU, and the same bits in any company."""

from pathlib import Path

import pytest
import torch
from gpu_steps import NUM_STEPS, SETTINGS, assert_equal, driver, prompt
from tiny_models import make_tiny
from triton_interpreter import IS_INTERPRETING
from worker_plans import Running, alone, loaded, spec, worker_config

from octavo.kernels.routing import Routing, route
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.layers import experts
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

MODELS = {
    "Qwen2MoeForCausalLM": {
        "num_hidden_layers": 1,
        "mlp_only_layers": [],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
    },
    "GptOssForCausalLM": {
        "num_hidden_layers": 1,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "DeepseekV3ForCausalLM": {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_attention_heads": 2,
    },
}
"""Experts beside one that every token has; experts with biases, sinks, and a window; latent attention."""
PROMPT, SAMPLING = prompt(8, seed=1), spec(temperature=1.0, seed=7, logprobs=1)
SMALL = {**SETTINGS, "max_num_seqs": 2, "max_num_batched_tokens": 8}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny(name, tmp_path_factory.mktemp(name), **settings) for name, settings in MODELS.items()}


@pytest.fixture(scope="module")
def computed_on_cpu(directories: dict[str, Path]) -> dict[str, Running]:
    results = {}
    for name, directory in directories.items():
        config = worker_config(directory, **SMALL)
        results[name] = alone(loaded(config), config, PROMPT, SAMPLING, NUM_STEPS)
    return results


@pytest.mark.parametrize(
    "name",
    [pytest.param("Qwen2MoeForCausalLM", marks=pytest.mark.long), "GptOssForCausalLM", "DeepseekV3ForCausalLM"],
)
def test_the_tokens_of_the_cpu_in_chunks_in_company_and_through_graphs(
    name: str,
    directories: dict[str, Path],
    computed_on_cpu: dict[str, Running],
    _kernels_of_gpus: None,
    stream: Stream,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = worker_config(directories[name], device="cuda", **SMALL)
    model = load_model(config, lambda fraction: None, device=device)
    eager = driver(model, config, stream, has_graphs=False)
    alone_request = eager.admit(0, PROMPT, SAMPLING)
    eager.run(NUM_STEPS)
    eager.executor.close()
    assert_equal(alone_request, computed_on_cpu[name])
    chosen: dict[int, torch.Tensor] = {}

    def recorded_route(logits_TE: torch.Tensor, *others: object) -> Routing:
        found = route(logits_TE, *others)
        chosen[len(logits_TE)] = found.expert_TK
        return found

    monkeypatch.setattr(experts, "route", recorded_route)
    core = driver(model, config, stream)
    core.admit(0, prompt(4), spec())
    request = core.admit(1, PROMPT, SAMPLING)
    core.begin({0: 4, 1: 3})
    core.begin({0: 1, 1: 5})
    core.run(NUM_STEPS - 1)
    core.executor.close()
    assert request.outputs == alone_request.outputs
    assert request.logprobs == alone_request.logprobs
    if IS_INTERPRETING:  # a GPU uses the memory again within the graph
        assert (chosen[8] >= 0).all(dim=1).tolist() == [True] * 6 + [False] * 2, "padding has no experts"
