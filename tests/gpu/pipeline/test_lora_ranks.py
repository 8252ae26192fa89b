"""LoRA adapters whose factors ranks divide, in captured graphs: ranks are processes, with Gloo in place of NCCL."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import on_forked_ranks
from gpu_steps import SETTINGS, assert_equal, driver, new_stream, prompt
from msgspec.structs import replace
from peft_adapters import load_of, write_adapter
from tiny_models import make_tiny
from transformers import PreTrainedModel
from triton_interpreter import IS_INTERPRETING
from worker_plans import Driver, HostExecutor, Running, loaded, spec, worker_config

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.lora.loader import open_adapters
from octavo.worker_proc.parallel.distributed import DistributedRanks
from octavo.worker_proc.weights.load import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN"),
    pytest.mark.xdist_group("pipeline"),
    pytest.mark.skipif(not IS_INTERPRETING, reason="ranks are forked processes, which cannot use a GPU"),
]
CPU = torch.device("cpu")
NUM_STEPS = 2
PROMPT = prompt(4)
SPEC = spec(logprobs=1, prompt_logprobs=1)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 12}
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def merged(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, PreTrainedModel]:
    """Two adapters, and the model with each merged into it. One rank has all of the second one's A."""
    paths = [tmp_path_factory.mktemp("adapters") / str(rank) for rank in (12, 5)]
    return {path: write_adapter(model_path, path, r=int(path.name), target_modules=TARGETS) for path in paths}


@pytest.fixture(scope="module")
def adapters(merged: dict[Path, PreTrainedModel]) -> list[Path]:
    return list(merged)


@pytest.fixture(scope="module")
def computed_on_cpu(model_path: Path, adapters: list[Path], merged: dict[Path, PreTrainedModel]) -> list[Running]:
    """A request without an adapter, and one with each, on one worker; equal to merged weights."""
    config = worker_config(model_path, **LORA, **SETTINGS)
    model = loaded(config)
    core = Driver(model, config, HostExecutor(model, config, 400, open_adapters(model, config)))
    core.adapter_loads = [load_of(path, slot) for slot, path in enumerate(adapters)]
    requests = [core.admit(slot, PROMPT, SPEC, adapter_slot=slot - 1) for slot in range(3)]
    core.run(NUM_STEPS)
    with torch.inference_mode():
        for request, whole in zip(requests[1:], merged.values(), strict=True):
            scores_V = whole(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
            assert int(scores_V.argmax()) == request.outputs[0]
            assert request.logprobs[0].logprobs[0] == pytest.approx(float(scores_V.max()), abs=1e-4)
    return requests


def compute(
    config: ResolvedConfig, adapters: list[Path], expected: list[Running], group: DistributedRanks, rank: int
) -> None:
    """Check a batch of all adapters against the CPU, and a request alone against the batch."""
    model = load_model(config, lambda fraction: None, device=CPU, rank=rank, group=group)
    assert config.lora is not None
    half_sharded = replace(config, lora=replace(config.lora, is_fully_sharded=False))
    num_bytes = open_adapters(model, half_sharded).num_bytes
    loader, stream = open_adapters(model, config), new_stream(CPU)
    assert loader.num_bytes < num_bytes
    core = driver(model, config, stream, adapters=loader)
    core.adapter_loads = [load_of(path, slot) for slot, path in enumerate(adapters)]
    together = [core.admit(slot, PROMPT, SPEC, adapter_slot=slot - 1) for slot in range(3)]
    core.begin({0: 1, 1: 4, 2: 3})
    core.begin({0: 3, 2: 1})
    core.run(NUM_STEPS - 1)
    for request, wanted in zip(together, expected, strict=True):
        assert_equal(request, wanted)
    for slot in range(3):
        core.release(slot)
    alone = core.admit(3, PROMPT, SPEC, adapter_slot=0)
    core.run(NUM_STEPS)
    assert stream.num_replays and any("c10d::_allgather_base_" in graph.nodes for graph in stream.graphs)
    core.executor.close()
    assert alone.logprobs == together[1].logprobs[: len(alone.logprobs)]
    assert alone.prompt_logprobs == together[1].prompt_logprobs


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_divide_both_factors(
    tmp_path: Path,
    model_path: Path,
    adapters: list[Path],
    computed_on_cpu: list[Running],
    _kernels_of_gpus: None,
    size: int,
) -> None:
    settings = {**LORA, **SETTINGS, "device": "cuda", "tensor_parallel_size": size}
    config = worker_config(model_path, fully_sharded_loras=True, **settings)
    on_forked_ranks(size, tmp_path / "ranks", partial(compute, config, adapters, computed_on_cpu))
