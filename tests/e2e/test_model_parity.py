"""Every architecture against `transformers` on the same weights, and against itself in other batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_runner import Runner, facts_of, filled, load, prompts, with_config
from pairwise import pairwise_first
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, MOE_ARCHITECTURES, make_tiny

from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.cache.groups import CacheGroup
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 256}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in (*ARCHITECTURES, *MOE_ARCHITECTURES)},
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "llama-rope-yarn": ("LlamaForCausalLM", {"rope_parameters": YARN_ROPE}),
    "llama-no-grouping": ("LlamaForCausalLM", {"num_key_value_heads": 6, "head_dim": 24}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 50}),
    "qwen3-windows": (
        "Qwen3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-last-windows": (
        "Qwen2ForCausalLM",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
    ),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    "deepseek-v3-yarn": (
        "DeepseekV3ForCausalLM",
        {"rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.8}, "rope_interleave": False},
    ),
    "opt-350m-form": ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-bias": ("OPTForCausalLM", {"enable_bias": False}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny(arch, root / name, **settings) for name, (arch, settings) in VARIANTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(
    variant: str, directories: dict[str, Path], kernels: NativeLibrary | None
) -> None:
    path = directories[variant]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    runner = Runner(load(path, torch.float32, kernels), torch.float32)
    tokens = prompts(theirs.config.vocab_size)
    for request in range(len(tokens)):
        with torch.inference_mode():
            expected = theirs(tokens[request][None]).logits[0]
        actual = runner.in_chunks(tokens, request, [len(tokens[request])])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    prompt = tokens[1]
    greedy = theirs.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0]
    assert torch.equal(runner.greedy(prompt, 24), greedy)


@pytest.mark.parametrize(
    ("variant", "kernels", "dtype"),
    pairwise_first(list(VARIANTS), ["torch", "native"], [torch.float32, torch.bfloat16]),
    indirect=["kernels"],
    ids=str,
)
def test_chunks_and_batches_do_not_change_a_bit(
    variant: str, dtype: torch.dtype, directories: dict[str, Path], kernels: NativeLibrary | None
) -> None:
    model = load(directories[variant], dtype, kernels)
    tokens = prompts(320)
    whole = [Runner(model, dtype).in_chunks(tokens, request, [len(tokens[request])]) for request in range(3)]
    assert all(bool(logits.isfinite().all()) for logits in whole)
    for ends in ([7, 8, 9, 60, 73, 130, 200], [128, 200], [1, 199, 200]):
        assert torch.equal(Runner(model, dtype).in_chunks(tokens, 0, ends), whole[0]), ends
    runner = Runner(model, dtype)
    together = runner.step(tokens, [(0, 0, 130), (1, 0, 5), (2, 0, 131)])
    together += runner.step(tokens, [(0, 130, 131), (1, 5, 37)])
    expected = [(0, 0, 130), (1, 0, 5), (2, 0, 131), (0, 130, 131), (1, 5, 37)]
    for logits, (request, start, end) in zip(together, expected, strict=True):
        assert torch.equal(logits, whole[request][start:end]), (request, start, end)
    decodes = runner.step(tokens, [(0, 131, 132), (1, 36, 37), (2, 130, 131)])
    for logits, (request, start) in zip(decodes, [(0, 131), (1, 36), (2, 130)], strict=True):
        assert torch.equal(logits[0], whole[request][start]), (request, start)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": {**LLAMA3_ROPE}},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                **{key: value for key, value in LLAMA3_ROPE.items() if not key.startswith("rope_")},
                "type": "llama3",
            },
        },
    ],
)
def test_every_spelling_of_a_rope_scaling_means_the_same(
    spelling: dict[str, Any], directories: dict[str, Path]
) -> None:
    path = directories["llama-rope-llama3"]
    facts = facts_of(path)
    plain = {key: value for key, value in facts.hf_config.items() if not key.startswith("rope_")}
    model = build_model(with_config(facts, {**plain, **spelling}), Placement(torch.float32))
    filled(model, path, kernels=None)
    tokens = prompts(320)
    expected = Runner(load(path, torch.float32, None), torch.float32).in_chunks(tokens, 0, [200])
    assert torch.equal(Runner(model, torch.float32).in_chunks(tokens, 0, [200]), expected)


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "mrope"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "'beta'"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "1 numbers for 8"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ("LlamaForCausalLM", {"hidden_act": "mish"}, "hidden_act"),
        ("LlamaForCausalLM", {"sliding_window": 40}, r"'sliding_window' \(40\) is unknown for LlamaForCausalLM"),
        ("LlamaForCausalLM", {"new_gate": True, "attention_gain": 2.0}, r"'attention_gain' \(2.0\), 'new_gate'"),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"]}, "1 'layer_types' for 2 layers"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "linear"]}, "'linear' are not supported"),
        ("MistralForCausalLM", {"layer_types": ["sliding_attention"] * 2}, "'sliding_window' is None"),
        ("LlamaForCausalLM", {"hidden_size": None}, "'hidden_size' is None"),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "is None"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 3}, "3 'layer_types' for 2 layers"),
        ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
            "sliding_window",
        ),
        ("OPTForCausalLM", {"activation_function": "gelu"}, "activation_function"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_is_not_supported_is_rejected(
    arch: str, changes: dict[str, Any], message: str, directories: dict[str, Path]
) -> None:
    facts = facts_of(directories[arch])
    with pytest.raises(ConfigError, match=message):
        build_model(with_config(facts, {**facts.hf_config, **changes}), Placement(torch.float32))


def test_an_unknown_architecture_names_the_known_ones(directories: dict[str, Path]) -> None:
    facts = facts_of(directories["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match="MadeUpForCausalLM is not supported") as caught:
        build_model(with_config(facts, facts.hf_config, architecture="MadeUpForCausalLM"), Placement(torch.float32))
    assert "LlamaForCausalLM" in caught.value.hint


def test_layers_with_block_tables_of_their_own_give_the_same_bits(
    directories: dict[str, Path], kernels: NativeLibrary | None
) -> None:
    path = directories["LlamaForCausalLM"]
    tokens = prompts(facts_of(path).vocab_size)
    parts = [(0, 0, len(tokens[0])), (1, 0, 9)]
    model = load(path, torch.float32, kernels)
    expected = Runner(model, torch.float32).step(tokens, parts)
    (group,) = model.cache_groups
    assert len(group.layers) == 2
    model.cache_groups = tuple(CacheGroup(group.shape, (layer,)) for layer in reversed(group.layers))
    runner = Runner(model, torch.float32)
    assert all(map(torch.equal, runner.step(tokens, parts), expected))
    more = runner.step(tokens, [(1, 9, len(tokens[1]))])[0]
    model.cache_groups = (group,)
    assert torch.equal(more, Runner(model, torch.float32).in_chunks(tokens, 1, [9, len(tokens[1])])[9:])


@pytest.mark.parametrize("variant", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
def test_weights_must_be_complete_and_fit(variant: str, directories: dict[str, Path]) -> None:
    path = directories[variant]
    weights = load_file(path / "model.safetensors")
    model = build_model(facts_of(path), Placement(torch.float32))
    first = next(iter(weights))
    with pytest.raises(ConfigError, match="lacks 1 tensors"):
        model.load_weights((name, tensor) for name, tensor in weights.items() if name != first)
    with pytest.raises(ConfigError, match="does not have"):
        model.load_weights({**weights, "model.layers.0.surprise": torch.zeros(1)}.items())
    with pytest.raises(ConfigError, match="has shape"):
        model.load_weights({**weights, first: torch.zeros(3, 5)}.items())


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_names_may_lack_their_prefix_and_tables_are_ignored(variant: str, directories: dict[str, Path]) -> None:
    path = directories[variant]
    weights = load_file(path / "model.safetensors")
    prefix = "transformer." if variant == "GPT2LMHeadModel" else "model."
    extra = {
        "GPT2LMHeadModel": {"h.0.attn.bias": torch.ones(1), "lm_head.weight": torch.ones(1)},
        "OPTForCausalLM": {"lm_head.weight": torch.ones(1)},
    }.get(variant, {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)})
    model = build_model(facts_of(path), Placement(torch.float32))
    model.load_weights({**{name.removeprefix(prefix): tensor for name, tensor in weights.items()}, **extra}.items())
    complete = build_model(facts_of(path), Placement(torch.float32))
    complete.load_weights(weights.items())
    expected = dict(complete.named_parameters())
    assert expected
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, expected[name]), name
