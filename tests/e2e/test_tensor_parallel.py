"""Ranks that share every layer of a model: the same bits on 1, 2, 4 and 8 of them."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_rank
import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from gguf_k_quants import quantize_k
from pairwise import pairwise
from quantized_checkpoints import write
from rank_threads import on_ranks
from safetensors.numpy import load_file
from tiny_families import FAMILIES
from tiny_hybrids import VARIANTS
from tiny_models import make_tiny
from worker_plans import Driver, Running, spec, worker_config
from workloads import ask_all, ask_one_by_one, random_requests

from octavo import AsyncClient
from octavo.kernels.all_reduce.native import exchanged_bytes
from octavo.kernels.experts.exchange import ExpertExchange, exchange_area_bytes
from octavo.kernels.native import library
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.parallel.group import SharedMemoryRanks
from octavo.worker_proc.parallel.sharding import Shard, Sharding, facts_of_rank
from octavo.worker_proc.weights.gguf_blocks import GgufMatrix
from octavo.worker_proc.weights.load import load_model

HEADS = {
    "LlamaForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 32},
    "Qwen2ForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256},
    "Qwen3ForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 256, "head_dim": 32},
    "OPTForCausalLM": {"num_attention_heads": 8, "hidden_size": 256, "word_embed_proj_dim": 64, "ffn_dim": 512},
    "GPT2LMHeadModel": {"n_head": 8, "n_embd": 256},
    "Qwen2MoeForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256},
    "Llama4ForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 32},
    "OlmoeForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 256},
    "DeepseekV3ForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 256, "v_head_dim": 32},
}
EXPERTS = {
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 2,
}
LLAMA_MLP = {"intermediate_size": 512, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    mlp = {"LlamaForCausalLM": LLAMA_MLP, "Qwen2ForCausalLM": {"intermediate_size": 512}}
    mlp["Qwen3ForCausalLM"] = mlp["Qwen2ForCausalLM"]
    mlp["Qwen2MoeForCausalLM"] = EXPERTS
    mlp["OlmoeForCausalLM"] = {"intermediate_size": 256, "num_experts_per_tok": 2}
    mlp["Llama4ForCausalLM"] = {"intermediate_size": 256, "intermediate_size_mlp": 512, "num_local_experts": 4}
    mlp["DeepseekV3ForCausalLM"] = {"intermediate_size": 512, "moe_intermediate_size": 256}
    return {arch: make_tiny(arch, folder / arch, **heads, **mlp.get(arch, {})) for arch, heads in HEADS.items()}


def generated(model: Model, config: ResolvedConfig) -> list[Any]:
    """Return the tokens and logprobs of three requests, computed in chunks and in one batch."""
    driver = Driver(model, config)
    requests: list[Running] = [
        driver.admit(slot, [(7 * slot + 3 * place) % 300 for place in range(length)], sampling)
        for slot, (length, sampling) in enumerate(
            [(5, spec(logprobs=2)), (40, spec(temperature=1.0, seed=3, logprobs=1)), (70, spec(prompt_logprobs=1))]
        )
    ]
    driver.step({0: 5, 1: 13, 2: 31})
    driver.step({0: 1, 1: 27, 2: 39})
    driver.run(6)
    return [(request.token_ids, request.logprobs, request.prompt_logprobs) for request in requests]


def on_size(path: Path, size: int, file: Path | None = None, **settings: Any) -> list[Any]:
    """Return what each of `size` ranks generates. `file`: a GGUF file with the weights; None: those of `path`."""
    config = worker_config(path, max_model_len=128, max_num_seqs=4, tensor_parallel_size=size, **settings)
    if file is not None:
        facts = msgspec.structs.replace(config.model, load_format="gguf", model_path=str(file))
        config = msgspec.structs.replace(config, model=facts, quantization="gguf")
    kernels = library.load()

    def compute(group: SharedMemoryGroup) -> list[Any]:
        ranks = SharedMemoryRanks(group) if size > 1 else None
        return generated(load_model(config, lambda _: None, library=kernels, rank=group.rank, group=ranks), config)

    torch.set_num_threads(1)
    area_bytes = max(exchanged_bytes(config.max_num_batched_tokens, 3 * 256, size), 64 * config.model.vocab_size * 4)
    return on_ranks(kernels, size, area_bytes, compute)


@pytest.mark.parametrize(
    ("arch", "size", "settings"),
    pairwise(
        list(HEADS),
        [2, 4, 8],
        [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"load_format": "dummy"}],
    ),
)
def test_the_number_of_ranks_changes_no_bit(
    models: dict[str, Path], arch: str, size: int, settings: dict[str, Any]
) -> None:
    results = on_size(models[arch], size, **settings)
    assert all(result == results[0] for result in results[1:]), "ranks disagree"
    if "load_format" not in settings:  # every rank makes up its own part of dummy weights
        assert results[:1] == on_size(models[arch], 1, **settings)


@pytest.mark.parametrize(("kind", "size"), [("gptq", 4), ("nf4", 2), ("fp8-blocks", 2), ("gptq-act-order", 2)])
def test_ranks_divide_quantized_checkpoints(kind: str, size: int, models: dict[str, Path], tmp_path: Path) -> None:
    write(kind, models["LlamaForCausalLM"], tmp_path / "quantized")
    # Inputs that are sorted by group cannot be divided, so ranks dequantize them, and one rank only if it has to.
    settings = {"dtype": "bfloat16", "enable_tp_invariant_inference": kind == "gptq-act-order"}
    results = on_size(tmp_path / "quantized", size, **settings)
    assert results == on_size(tmp_path / "quantized", 1, **settings) * size


@pytest.mark.parametrize(
    "family",
    ["gemma2", "phi3-window", "gpt-neox", "cohere2", "cohere-norms", "glm4", "falcon-40b", "bloom", "mpt", "olmo2"],
)
def test_ranks_divide_fused_and_interleaved_projections(family: str, tmp_path: Path) -> None:
    arch, class_name, settings = FAMILIES[family]
    sizes = {"hidden_size": 256, "d_model": 256, "intermediate_size": 512, "num_key_value_heads": 4, "num_kv_heads": 4}
    sizes |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 8)
    sizes["num_key_value_heads"] = 8 if family == "gpt-neox" else 4
    wide = {key: sizes.get(key, value) for key, value in settings.items()}
    if family == "glm4":
        wide["head_dim"] = 32
    path = make_tiny(arch, tmp_path / family, class_name=class_name, **wide)
    assert on_size(path, 2) == on_size(path, 1) * 2


WITH_STATES = {
    "mamba2": {"num_heads": 16, "head_dim": 32, "n_groups": 2},
    "granite-hybrid": {"mamba_n_heads": 16, "mamba_n_groups": 1, "num_local_experts": 8},
    "granite-hybrid-dense": {"mamba_n_heads": 16, "mamba_n_groups": 8, "shared_intermediate_size": 256},
    "falcon-h1": {"mamba_d_ssm": 256},
    "falcon-h1-norm": {"mamba_n_heads": 16, "mamba_n_groups": 2},
    "falcon-h1-gate-first": {"mamba_d_ssm": 256, "mamba_n_groups": 1},
    "nemotron-h": {"mamba_num_heads": 8, "n_groups": 4},
    "nemotron-h-moe": {"mamba_num_heads": 8, "n_groups": 2},
    "nemotron-h-latents": {"mamba_num_heads": 8, "n_groups": 8},
    "lfm2": {},
    "lfm2-bias": {},
    "lfm2-moe": {},
    "qwen3-next": {"linear_num_value_heads": 8},
    "qwen3-next-dense": {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
}
"""Sizes that 8 ranks can divide."""
_WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "block_multiple_of": 256}
_WIDE |= {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_head_dim": 32, "linear_value_head_dim": 32}
_WIDE |= dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size"), 256)
_WIDE |= {"shared_expert_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256, "head_dim": 32}


INT8 = {"dtype": "bfloat16", "quantization": "int8"}
STATE_CASES = [
    *((family, 4, {}) for family in WITH_STATES),
    *((family, 2, INT8) for family in WITH_STATES if family not in VARIANTS),
    *((family, 8, {"dtype": "bfloat16"}) for family in ("mamba2", "falcon-h1", "nemotron-h", "lfm2")),
    *(
        (family, 8, {"enable_expert_parallel": True})
        for family in ("granite-hybrid", "lfm2-moe", "qwen3-next", "nemotron-h-moe")
    ),
]


@pytest.mark.parametrize(("family", "size", "settings"), STATE_CASES)
def test_ranks_divide_recurrent_states(family: str, size: int, settings: dict[str, Any], tmp_path: Path) -> None:
    arch, class_name, tiny = FAMILIES[family]
    sizes = {**tiny, **{key: value for key, value in _WIDE.items() if key in tiny}, **WITH_STATES[family]}
    path = make_tiny(arch, tmp_path / family, class_name=class_name, **sizes)
    alone = {key: value for key, value in settings.items() if key != "enable_expert_parallel"}
    assert on_size(path, size, **settings) == on_size(path, 1, **alone) * size


def test_ranks_that_share_key_heads_cannot_normalize_all_of_them(tmp_path: Path) -> None:
    arch, class_name, settings = FAMILIES["olmo2"]
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512}
    path = make_tiny(arch, tmp_path, class_name=class_name, **{**settings, **sizes})
    assert on_size(path, 2) == on_size(path, 1) * 2
    with pytest.raises(ConfigError, match="normalizes all 2 heads") as caught:
        on_size(path, 4)
    assert caught.value.hint == "use --tensor-parallel-size 2 or fewer"


@pytest.mark.parametrize(("size", "settings"), [(2, {}), (4, {"dtype": "bfloat16", "quantization": "int8"})])
def test_ranks_that_divide_the_experts_change_no_bit(
    models: dict[str, Path], size: int, settings: dict[str, Any]
) -> None:
    path = models["Qwen2MoeForCausalLM"]
    (alone,) = on_size(path, 1, **settings)
    flags = {"enable_expert_parallel": True, "enable_tp_invariant_inference": True}
    assert on_size(path, size, **flags, **settings) == [alone] * size


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_engines_that_divide_the_experts_change_no_bit(models: dict[str, Path], settings: dict[str, Any]) -> None:
    """One of two engines, and one without requests, which takes part in as many steps."""
    path, kernels, size = models["Qwen2MoeForCausalLM"], library.load(), 2
    (alone,) = on_size(path, 1, **settings)
    both = worker_config(
        path, max_model_len=128, max_num_seqs=4, data_parallel_size=size, enable_expert_parallel=True, **settings
    )
    assert both.is_lock_step
    bounds = {"max_rows": both.max_num_batched_tokens, "width": 256, "top_k": EXPERTS["num_experts_per_tok"]}

    def compute(group: SharedMemoryGroup) -> list[Any]:
        config = msgspec.structs.replace(both, engine_index=group.rank)
        engines = ExpertExchange(group, group.rank, size, is_publisher=True, **bounds)
        model = load_model(config, lambda _: None, library=kernels, engines=engines)
        if group.rank == 0:
            return generated(model, config)
        driver = Driver(model, config)
        for _ in range(8):
            driver.step({})
        return []

    torch.set_num_threads(1)
    assert on_ranks(kernels, size, exchange_area_bytes(size, **bounds), compute) == [alone, []]


def test_ranks_without_an_expert_are_rejected(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="8 experts for 9 ranks"):
        Sharding(0, 9, divides_experts=True).own_experts(8)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        worker_config(models["LlamaForCausalLM"], enable_expert_parallel=True)


def test_a_quantized_embedding_that_is_the_output_weight_too_is_divided(tmp_path: Path) -> None:
    arch, heads = "Qwen2ForCausalLM", HEADS["Qwen2ForCausalLM"]
    model = make_tiny(arch, tmp_path / arch, **heads, intermediate_size=512, tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    kind = GGMLQuantizationType.Q8_0
    file = write_gguf(tmp_path / "x.gguf", "qwen2", tensors, num_heads=8, num_kv_heads=2, kind=kind)
    (alone,) = on_size(model, 1, file)
    assert on_size(model, 2, file) == [alone, alone]


def test_a_quantized_matrix_of_a_file_is_divided_between_ranks() -> None:
    values = torch.randn(12, 512, generator=torch.Generator().manual_seed(0)).numpy()
    matrix = GgufMatrix("blk.0.x", GGMLQuantizationType.Q6_K, quantize_k(values, GGMLQuantizationType.Q6_K))
    for shard in (
        Shard(0, 12, (range(3, 6),)),
        Shard(0, 12, (range(1, 2), range(5, 6), range(9, 10))),
        Shard(1, 512, (range(256, 512),)),
    ):
        part = matrix.part(shard)
        assert torch.equal(part.dequantized(), shard.of(matrix.dequantized()))
        assert torch.equal(part.quantized().levels_OI, shard.of(matrix.quantized().levels_OI))
    with pytest.raises(ConfigError, match=r"blk.0.x has 512 inputs in blocks of 256 \(Q6_K\)"):
        matrix.part(Shard(1, 512, (range(128, 256),)))


@pytest.mark.parametrize(
    ("arch", "size", "message"),
    [
        ("LlamaForCausalLM", 3, r"does not divide the model's num_attention_heads \(8\).*use one of 1, 2, 4, 8"),
        ("GPT2LMHeadModel", 16, r"does not divide the model's num_attention_heads \(8\)"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_rejected(
    models: dict[str, Path], arch: str, size: int, message: str
) -> None:
    facts = worker_config(models[arch]).model
    with pytest.raises(ConfigError) as raised:
        facts_of_rank(facts, size)
    assert re.search(message, f"{raised.value} {raised.value.hint}", re.DOTALL)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("mamba2", 5, r"does not divide the model's num_heads \("),
        ("qwen3-next", 3, r"does not divide the model's linear_num_value_heads \(4\)"),
        ("nemotron-h", 2, r"neither divides the model's n_groups \(3\) nor is a multiple.*use one of 1$"),
        ("lfm2", 5, r"does not divide the model's hidden_size \(48\)"),
    ],
)
def test_states_that_ranks_cannot_divide_are_rejected(family: str, size: int, message: str, tmp_path: Path) -> None:
    arch, class_name, settings = FAMILIES[family]
    facts = worker_config(make_tiny(arch, tmp_path, class_name=class_name, **settings)).model
    with pytest.raises(ConfigError) as raised:
        facts_of_rank(facts, size)
    assert re.search(message, f"{raised.value} {raised.value.hint}", re.DOTALL)


def test_ranks_exchange_through_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(Path(distributed_rank.__file__)), str(tmp_path / "ranks")]
    processes = [subprocess.Popen([*command, str(rank), "3"]) for rank in range(3)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
def test_ranks_that_compute_through_torch_are_batch_invariant(model: Path) -> None:
    settings = {"dtype": "bfloat16", "max_model_len": 256, "tensor_parallel_size": 2, "cpu_kernels": "torch"}
    requests = random_requests(seed=7, count=12, vocab_size=100)

    async def main() -> None:
        async with AsyncClient.launch(str(model), **settings) as client:
            assert await ask_all(client, requests) == await ask_one_by_one(client, requests)

    asyncio.run(main())
