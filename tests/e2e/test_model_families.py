"""The dense families against `transformers` on the same weights, and against themselves in other batches."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import published_configs
import published_hybrid_configs
import published_moe_configs
import pytest
import torch
import transformers
from model_runner import (
    Runner,
    assert_chunks_and_batches_do_not_change_a_bit,
    assert_equals_transformers,
    facts_of,
    filled,
    load,
    packed,
    prompts,
    results_of_transformers,
    with_config,
)
from safetensors.torch import load_file
from tiny_families import FAMILIES, WINDOW
from tiny_hybrids import VARIANTS
from tiny_models import ARCHITECTURES as DENSE_ARCHITECTURES
from tiny_models import MOE_ARCHITECTURES, make_tiny
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from worker_plans import worker_config

from octavo import AsyncClient
from octavo.core_proc.cache.sizing import memory_table, plan_cache
from octavo.frontend.model_files import media
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import DeviceFacts, ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.protocol.params import OutputKind, SamplingParams
from octavo.worker_proc.facts import cache_group_specs
from octavo.worker_proc.models.docs import with_families, with_media_families
from octavo.worker_proc.models.hf_keys import READ_ELSEWHERE
from octavo.worker_proc.models.layers.short_conv import ShortConv
from octavo.worker_proc.models.media_families import MEDIA_FAMILIES
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.registry import ARCHITECTURES, Family, build_model
from octavo.worker_proc.models.vision.registry import AUDIO_ENCODERS, TOWERS
from octavo.worker_proc.parallel.placement import Placement

MAX_LEN = 512
KINDS = (
    *("gemma2", "gemma3", "phi", "gpt-neox", "olmo2", "cohere2", "mpt", "bloom", "falcon-40b", "mamba2"),
    *("granite-hybrid", "lfm2-moe", "qwen3-next", "nemotron-h"),
)
"""Families with each kind of norm, position, mask, attention and state: the torch path is slow, and only a reference,
so the default run tests no others there."""
FAMILIES_AND_KERNELS = [
    pytest.param(name, kernels, marks=pytest.mark.long if name in VARIANTS or name not in among else ())
    for kernels, among in (("torch", KINDS), ("native", FAMILIES))
    for name in FAMILIES
]
CONFIGS = published_configs.CONFIGS | published_hybrid_configs.CONFIGS | published_moe_configs.CONFIGS
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 256}
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module", autouse=True)
def biases_in_float32() -> Iterator[None]:
    """Replace transformers' biases of Falcon, rounded to bfloat16, by those of BLOOM: the same, in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def tiny(name: str, root: Path) -> Path:
    arch, class_name, settings = FAMILIES.get(name, (name, None, {}))
    directory = root / name
    return directory if directory.exists() else make_tiny(arch, directory, class_name=class_name, **settings)


def reference(path: Path) -> transformers.PreTrainedModel:
    """Return the model as `transformers` computes it."""
    # Falcon's eager attention in transformers 5 adds the biases of ALiBi twice.
    implementation = "sdpa" if path.name.startswith("falcon") else "eager"
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=implementation
    )


@cache
def expected(path: Path) -> tuple[list[Tensor], Tensor]:
    return results_of_transformers(reference(path))


@pytest.mark.parametrize(("family", "kernels"), FAMILIES_AND_KERNELS, indirect=["kernels"])
def test_logits_and_greedy_tokens_equal_transformers(family: str, root: Path, kernels: NativeLibrary | None) -> None:
    path = tiny(family, root)
    runner = Runner(load(path, torch.float32, kernels), torch.float32, MAX_LEN)
    assert_equals_transformers(runner, *expected(path))


@pytest.mark.parametrize(("family", "kernels"), FAMILIES_AND_KERNELS, indirect=["kernels"])
def test_chunks_and_batches_do_not_change_a_bit(family: str, root: Path, kernels: NativeLibrary | None) -> None:
    # bfloat16 through torch and float32 in programs: each path has one type in which more is rounded.
    dtype = torch.bfloat16 if kernels is None else torch.float32
    assert_chunks_and_batches_do_not_change_a_bit(Runner(load(tiny(family, root), dtype, kernels), dtype, MAX_LEN))


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, *DENSE_ARCHITECTURES, *MOE_ARCHITECTURES])
def test_a_missing_key_means_what_it_means_in_transformers(family: str, root: Path) -> None:
    path = tiny(family, root)
    facts = facts_of(path)
    defaults = type(transformers.AutoConfig.from_pretrained(path))().to_dict()
    short = {
        key: value
        for key, value in facts.hf_config.items()
        if key in READ_ELSEWHERE or key not in defaults or value != defaults[key]
    }
    assert len(short) < len(facts.hf_config)
    tokens = prompts(320)
    expected = Runner(load(path, torch.float32, None), torch.float32, MAX_LEN).in_chunks(tokens, 1, [37])
    model = filled(build_model(with_config(facts, short), Placement(torch.float32)), path, None)
    assert torch.equal(Runner(model, torch.float32, MAX_LEN).in_chunks(tokens, 1, [37]), expected)


def test_internlm_is_a_llama_with_other_names(root: Path, kernels: NativeLibrary | None) -> None:
    # transformers has no InternLM, so the same numbers must come from a Llama's weights under its names.
    path = make_tiny("LlamaForCausalLM", root / "llama", attention_bias=True, mlp_bias=True)
    tokens = prompts(320)
    expected = Runner(load(path, torch.float32, kernels), torch.float32).in_chunks(tokens, 0, [200])
    facts, weights = facts_of(path), load_file(path / "model.safetensors")
    config = {key: value for key, value in facts.hf_config.items() if key not in ("attention_bias", "mlp_bias")}
    third = with_config(facts, {**config, "bias": True, "qkv_bias": True}, architecture="InternLM3ForCausalLM")
    model = packed(build_model(third, Placement(torch.float32)), weights, kernels)
    assert torch.equal(Runner(model, torch.float32).in_chunks(tokens, 0, [200]), expected)

    bias = {**config, "mlp_bias": True, "bias": True}
    second = with_config(facts, bias, architecture="InternLM2ForCausalLM")
    model = packed(build_model(second, Placement(torch.float32)), dict(internlm2(weights, facts)), kernels)
    assert torch.equal(Runner(model, torch.float32).in_chunks(tokens, 0, [200]), expected)


def internlm2(weights: Mapping[str, Tensor], facts: ModelFacts) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a Llama under InternLM2's names, with the projections of a key head side by side."""
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in weights.items():
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            rows = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            heads = [part.unflatten(0, (facts.num_kv_heads, -1)) for part in rows]
            yield name.replace("self_attn.q_proj", "attention.wqkv"), torch.cat(heads, dim=1).flatten(0, 1)
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        yield name, tensor


def test_the_example_of_the_docs(root: Path, kernels: NativeLibrary | None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = re.search(r"```python\n(.*?)```", (DOCS / "models.md").read_text("utf-8"), re.DOTALL)
    assert source is not None
    module = ModuleType("octavo.worker_proc.models.seed_oss")
    exec(compile(source[1], "docs/models.md", "exec"), module.__dict__)
    family = Family("Seed-OSS", "seed_oss", ("SeedOssForCausalLM",), "biases of attention")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ARCHITECTURES, "SeedOssForCausalLM", family)
    settings = {**FAMILIES["arcee"][2], "attention_out_bias": True, "residual_dropout": 0.0}
    path = root / "seed-oss"
    if not path.exists():
        make_tiny("SeedOssForCausalLM", path, class_name="SeedOssConfig", **settings)
    logits, _ = expected(path)
    runner = Runner(load(path, torch.float32, kernels), torch.float32, MAX_LEN)
    actual = runner.in_chunks(prompts(320), 0, [200])
    torch.testing.assert_close(actual.log_softmax(1), logits[0].log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "mpt",
            {"attn_config": {"alibi": True, "sliding_window_size": 64}},
            r"'sliding_window_size' \(64\) in 'attn_config' is unknown for MptForCausalLM",
        ),
        ("mpt", {"attn_config": {"alibi": True, "clip_qkv": "8"}}, "'clip_qkv' in 'attn_config' is '8'"),
        ("phi3", {"sliding_window": 0}, "'sliding_window' is 0"),
        ("starcoder2", {"sliding_window": "40"}, "'sliding_window' is '40'"),
        ("MixtralForCausalLM", {"sliding_window": -1}, "'sliding_window' is -1"),
        ("phi", {"partial_rotary_factor": 2.0, "rope_parameters": None}, "2.0 of a head cannot be rotated"),
        ("phi", {"use_parallel_residual": False}, "'use_parallel_residual'"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLX"}, "letters L and G"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 576}, "config.json: latent attention"),
        ("Qwen2MoeForCausalLM", {"attention_bias": True}, "'attention_bias'"),
        ("granite-hybrid", {"mamba_d_head": 12}, "6 'mamba_n_heads' of 12 'mamba_d_head'"),
        ("granite-hybrid", {"mamba_n_groups": 4}, "6 'mamba_n_heads' for 4 'mamba_n_groups'"),
        ("granite-hybrid", {"time_step_limit": "0, inf"}, "'time_step_limit' is '0, inf'"),
        ("granite-hybrid", {"layer_types": ["mamba", "attention", "conv", "mamba"]}, "the layer types 'conv'"),
        ("qwen3-next", {"linear_num_key_heads": 3}, "4 'linear_num_value_heads' for 3 'linear_num_key_heads'"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, "'ssm_multipliers' has 1 numbers; expected 5"),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "M-M*X"}, "the layer types 'X'"),
        ("nemotron-h-moe", {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' is 'silu'"),
        ("nemotron-h", {"n_groups": 4}, "6 'mamba_num_heads' for 4 'n_groups'"),
        ("lfm2", {"layer_types": ["conv"]}, "1 'layer_types' for 4 layers"),
        ("lfm2", {"block_dim": 64}, "'block_dim' is 64"),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "'num_experts_per_tok' is 2; only 1 is supported"),
        ("Llama4ForCausalLM", {"attention_chunk_size": None}, "'attention_chunk_size' is None"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1, 0]}, "2 'no_rope_layers' for 4 layers"),
        ("Llama4ForCausalLM", {"rope_parameters": YARN}, "multiplies queries and keys by 1.139"),
        ("Qwen3MoeForCausalLM", {"shared_expert_intermediate_size": 64}, "'shared_expert_intermediate_size' is 64"),
    ],
)
def test_what_is_not_supported_is_rejected(family: str, changes: dict[str, Any], message: str, root: Path) -> None:
    facts = facts_of(tiny(family, root))
    with pytest.raises(ConfigError, match=message):
        build_model(with_config(facts, {**facts.hf_config, **changes}), Placement(torch.float32))


def test_letters_are_the_types_of_layers_and_the_last_layer_sees_everything(root: Path) -> None:
    facts = facts_of(tiny("exaone4", root))
    pattern = {"layer_types": None, "sliding_window_pattern": "LGLL"}
    model = build_model(with_config(facts, {**facts.hf_config, **pattern}), Placement(torch.float32))
    windows = {layer: group.shape.window for group in model.cache_groups for layer in group.layers}
    assert windows == {0: WINDOW, 1: None, 2: WINDOW, 3: None}


def test_gpus_that_would_divide_states_are_refused_before_anything_is_allocated() -> None:
    several: Any = object()
    divided = Parameters(Placement(torch.float32, torch.device("cuda"), group=several), prefixes=[])
    with pytest.raises(ConfigError, match="GPUs cannot divide the states of recurrent layers"):
        ShortConv(divided, "conv", 0, 8, 3, has_bias=False)


def test_the_table_of_the_docs_is_up_to_date() -> None:
    page = (DOCS / "models.md").read_text("utf-8")
    assert with_families(page) == page, "run scripts/docs"
    assert all(f"`{name}`" in page for name in ARCHITECTURES)


def test_the_table_of_models_that_read_media_is_up_to_date() -> None:
    page = (DOCS / "multimodal.md").read_text("utf-8")
    assert with_media_families(page) == page, "run scripts/docs"
    kinds = {name: family.kinds for family in MEDIA_FAMILIES for name in family.architectures}
    images, audio, videos = ({name for name in kinds if kind in kinds[name]} for kind in ("image", "audio", "video"))
    assert images == TOWERS.keys() and audio == AUDIO_ENCODERS.keys()
    assert videos == set(media.VIDEO_ARCHITECTURES)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations_are_accepted_and_planned(name: str, tmp_path: Path) -> None:
    num_parameters, num_windowed, config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolved = worker_config(tmp_path, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True)
    model = build_model(resolved.model, Placement(torch.bfloat16, torch.device("meta")))
    assert model.weights_bytes / 2 == pytest.approx(num_parameters, rel=0.01)
    windowed = [group for group in model.cache_groups if group.shape.window is not None]
    assert sum(len(group.layers) for group in windowed) == num_windowed
    facts = DeviceFacts(
        rank=0,
        device_name="cpu",
        total_bytes=2**42,
        free_bytes=2**42,
        weights_bytes=model.weights_bytes,
        activation_bytes=2**30,
        cache_groups=cache_group_specs(model, resolved),
    )
    plan = plan_cache(resolved, [facts])
    assert plan.max_model_len == resolved.max_model_len
    assert "KV cache" in memory_table(resolved, [facts], plan)


@pytest.mark.parametrize(
    "family",
    [
        name if name == "gemma3" else pytest.param(name, marks=pytest.mark.long)
        for name in (*FAMILIES, *MOE_ARCHITECTURES)
    ],
)
def test_whole_engines_give_the_tokens_of_transformers(family: str, root: Path) -> None:
    path = tiny(family, root)
    theirs = reference(path)
    generator = torch.Generator().manual_seed(3)
    lengths = [700, 613] if family == "phi3" else [1, 2, 17, 300, 700]  # LongRoPE depends on the engine's limit
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)

    async def ask(client: AsyncClient, prompt: list[int]) -> list[int]:
        (output,) = [output async for output in client.generate(prompt, greedy)]
        return list(output.outputs[0].token_ids)

    async def main() -> list[list[list[int]]]:
        settings = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 128, "max_num_seqs": 8}
        async with AsyncClient.launch(str(path), **settings) as client:
            # Chunks and mixed batches; then every prompt is in the prefix cache.
            return [list(await asyncio.gather(*(ask(client, prompt) for prompt in prompts))) for _ in range(2)]

    expected = []
    for prompt in prompts:
        known = torch.tensor(prompt)
        with torch.inference_mode():
            for _ in range(12):
                known = torch.cat((known, theirs(known[None]).logits[0, -1].argmax()[None]))
        expected.append(known[len(prompt) :].tolist())
    assert asyncio.run(main()) == [expected, expected]
