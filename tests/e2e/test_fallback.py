"""Models that `transformers` computes with our attention and products, against `transformers` alone."""

import asyncio
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from model_runner import (
    Runner,
    assert_chunks_and_batches_do_not_change_a_bit,
    assert_equals_transformers,
    facts_of,
    filled,
    prompts,
    results_of_transformers,
)
from msgspec.structs import replace
from tiny_fallback import FALLBACKS
from tiny_families import FAMILIES
from tiny_models import make_tiny
from torch import Tensor
from transformers import masking_utils
from worker_plans import loaded as loaded_as
from worker_plans import worker_config

from octavo import AsyncClient
from octavo.kernels.native import library
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.errors import ConfigError
from octavo.protocol.params import OutputKind, SamplingParams
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.fallback.hooks import PROBE
from octavo.worker_proc.models.fallback.model import TransformersModel
from octavo.worker_proc.models.registry import ARCHITECTURES, build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.runners.torch.batch_invariance import check_batch_invariance

MAX_LEN = 512
SHORT = ("ctrl", "cwm", "ernie4.5-moe", "gpt-neo", "gptj", "minicpm3", "roberta", "stablelm", "vaultgemma")
"""Those of the default run: the others add no kind of parameter, mask or position."""
WITH_FAMILY = ("gemma3", "cohere2", "gpt-neox", "phi", "smollm3")
NAMES = [
    *SHORT,
    *(pytest.param(name, marks=pytest.mark.long) for name in [*FALLBACKS, *WITH_FAMILY] if name not in SHORT),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fallback")


def tiny(name: str, root: Path) -> Path:
    arch, class_name, settings = (FALLBACKS | FAMILIES)[name]
    directory = root / name
    return directory if directory.exists() else make_tiny(arch, directory, class_name=class_name, **settings)


def loaded(path: Path, dtype: torch.dtype, kernels: NativeLibrary | None) -> Model:
    facts = replace(facts_of(path), model_impl="transformers")
    return filled(build_model(facts, Placement(dtype)), path, kernels)


@cache
def expected(path: Path) -> tuple[list[Tensor], Tensor]:
    return results_of_transformers(
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, root: Path, kernels: NativeLibrary | None) -> None:
    path = tiny(name, root)
    runner = Runner(loaded(path, torch.float32, kernels), torch.float32, MAX_LEN)
    assert_equals_transformers(runner, *expected(path))


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_batches_do_not_change_a_bit(name: str, root: Path, kernels: NativeLibrary | None) -> None:
    dtype = torch.bfloat16 if kernels is None else torch.float32
    assert_chunks_and_batches_do_not_change_a_bit(Runner(loaded(tiny(name, root), dtype, kernels), dtype, MAX_LEN))


def test_every_architecture_here_has_no_family() -> None:
    assert not {architecture for architecture, _, _ in FALLBACKS.values()} & set(ARCHITECTURES)


def test_windows_become_cache_groups(root: Path) -> None:
    model = loaded(tiny("cwm", root), torch.float32, None)
    assert {layer: group.shape.window for group in model.cache_groups for layer in group.layers} == {
        0: 40,
        1: None,
        2: 40,
    }


def test_positions_behind_those_of_padding(root: Path) -> None:
    """The table of RoBERTa has 514 rows, of which tokens have 512: the first two are of padding."""
    path = tiny("roberta", root)
    model = loaded(path, torch.float32, library.load())
    model.prepare(512)
    with pytest.raises(ConfigError, match="has 512 positions, not 513") as refused:
        model.prepare(513)
    assert "--max-model-len 512" in (refused.value.hint or "")
    config = worker_config(path, max_model_len=512)
    trial_model = loaded_as(config)
    assert isinstance(trial_model, TransformersModel)
    assert check_batch_invariance(trial_model, config) == ""
    trial_model._first_position = 0
    with pytest.raises(ConfigError, match="positions that it counts by itself give other logits"):
        check_batch_invariance(trial_model, config)


_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 2.0, 4.0, 6.0]}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, **_FACTORS}
LENGTH_DEPENDENT = {
    "minicpm3": _LONGROPE,
    "phimoe": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    "seed-oss": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}
POSITIONS = {"seed-oss": 128}


@pytest.mark.parametrize("max_len", [128, 512])
@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_angles_are_those_of_the_longest_possible_request(name: str, max_len: int, tmp_path: Path) -> None:
    """`transformers` takes them from the highest position, so there a last row has that of the longest request."""
    arch, class_name, settings = FALLBACKS[name]
    changes = {"rope_parameters": LENGTH_DEPENDENT[name], "max_position_embeddings": POSITIONS.get(name, 512)}
    changes |= {"head_dim": 8} if name != "minicpm3" else {}
    path = make_tiny(arch, tmp_path / name, class_name=class_name, **{**settings, **changes})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    runner = Runner(loaded(path, torch.float32, library.load()), torch.float32, max_len)
    tokens = [prompt[:112] for prompt in prompts(320)]
    for request, prompt in enumerate(tokens):
        rows, positions = torch.cat((prompt, prompt[:1])), torch.arange(len(prompt) + 1)
        positions[-1] = max_len - 1
        with torch.inference_mode():
            logits = theirs(rows[None], position_ids=positions[None]).logits[0, :-1]
        for ends in ([len(prompt)], [7, 16, len(prompt)]):
            actual = runner.in_chunks(tokens, request, ends)
            torch.testing.assert_close(actual.log_softmax(1), logits.log_softmax(1), rtol=1e-4, atol=1e-4)


REFUSED = {
    "MambaForCausalLM": (
        {"hidden_size": 48, "num_hidden_layers": 2},
        "MambaForCausalLM cannot run through transformers: its layers have a recurrent state",
    ),
    "BertLMHeadModel": ({}, "attention.self is not causal"),
    "XGLMForCausalLM": (
        {"d_model": 48, "num_layers": 2, "attention_heads": 6, "ffn_dim": 96},
        "0 of 2 layers attend through the attention interface",
    ),
    "DiffLlamaForCausalLM": ({}, "self_attn attends more than once for each token"),
    "DogeForCausalLM": ({}, "the mask of model.layers.0.self_attn is neither causal, nor a window, nor a chunk"),
    "Llama4ForCausalLM": ({}, "feed_forward.experts.gate_up_proj of 3 dimensions is not multiplied expert by expert"),
    "BartForCausalLM": ({"is_encoder_decoder": True}, "it has an encoder and a decoder"),
}
SMALL = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_refusals_name_the_reason(architecture: str, root: Path) -> None:
    settings, reason = REFUSED[architecture]
    config_class = getattr(transformers, architecture).config_class
    config = config_class(**({**SMALL, **settings} if "n_embd" not in settings else {"vocab_size": 320, **settings}))
    facts = replace(
        facts_of(tiny("ctrl", root)),
        architecture=architecture,
        hf_config=config.to_dict(),
        num_layers=2,
        model_impl="transformers",
    )
    with pytest.raises(ConfigError, match=reason):
        build_model(facts, Placement(torch.float32))


def test_remote_code_needs_the_flag(root: Path) -> None:
    facts = facts_of(tiny("ctrl", root))
    known = replace(facts, architecture="TheirModel", hf_config={"auto_map": {"AutoModelForCausalLM": "code.Theirs"}})
    with pytest.raises(ConfigError, match="code in the model's repository") as refused:
        build_model(known, Placement(torch.float32))
    assert "--trust-remote-code" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="the architecture NoModel is not supported"):
        build_model(replace(facts, architecture="NoModel"), Placement(torch.float32))
    with pytest.raises(ConfigError, match="has no family"):
        build_model(replace(facts, model_impl="octavo"), Placement(torch.float32))


REMOTE_CODE = """
from transformers import SeedOssForCausalLM


class TheirModel(SeedOssForCausalLM):
    pass
"""


def test_code_of_the_repository_runs_with_the_flag(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny("SeedOssForCausalLM", tmp_path / "remote", class_name="SeedOssConfig", **SMALL)
    logits, _ = expected(path)
    (path / "modeling_their.py").write_text(REMOTE_CODE)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["TheirModel"], "auto_map": {"AutoModelForCausalLM": "modeling_their.TheirModel"}}
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    facts = replace(facts_of(path), trust_remote_code=True)
    model = filled(build_model(facts, Placement(torch.float32)), path, library.load())
    tokens = prompts(320)
    actual = Runner(model, torch.float32, MAX_LEN).in_chunks(tokens, 1, [len(tokens[1])])
    torch.testing.assert_close(actual.log_softmax(1), logits[1].log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("code", "config", "reason"),
    [
        ("import a_package_that_is_missing", {}, "ImportError: .*a_package_that_is_missing"),
        ("def (", {}, "SyntaxError"),
        ("class TheirModel: pass", {}, "TheirModel is no PreTrainedModel"),
        (REMOTE_CODE, {"model_type": "theirs"}, "no model_type 'theirs', and auto_map names no AutoConfig"),
        (REMOTE_CODE + "    def __init__(self, config):\n        1 / 0\n", {}, "ZeroDivisionError"),
    ],
)
def test_failures_of_remote_code_are_refusals_in_one_line(
    code: str, config: dict[str, str], reason: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "modeling_their.py").write_text(code)
    hf_config = {"auto_map": {"AutoModelForCausalLM": "modeling_their.TheirModel"}, "model_type": "seed_oss", **config}
    facts = facts_of(tiny("ctrl", root))
    changes = {"model_path": str(tmp_path), "architecture": "TheirModel", "hf_config": hf_config}
    with pytest.raises(ConfigError, match=f"TheirModel cannot run through transformers: .*{reason}") as refused:
        build_model(replace(facts, **changes, trust_remote_code=True), Placement(torch.float32))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": "48"}, "StrictDataclassFieldValidationError: .*hidden_size"),
        ({"layer_types": ["other"]}, "StrictDataclassClassValidationError: .*layer_types"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "its checkpoint is quantized"),
    ],
)
def test_configurations_that_transformers_refuses(change: dict[str, object], reason: str, root: Path) -> None:
    facts = facts_of(tiny("stablelm", root))
    with pytest.raises(ConfigError, match=f"StableLmForCausalLM cannot run through transformers: .*{reason}"):
        build_model(replace(facts, hf_config={**facts.hf_config, **change}), Placement(torch.float32))


def test_masks_say_which_keys_they_show() -> None:
    config = transformers.LlamaConfig(sliding_window=7, attention_chunk_size=5)
    config._attn_implementation = PROBE
    arguments = (config, torch.zeros(1, 8, 4), None, None, torch.arange(8)[None])  # by position: 5.24 renamed the cache
    masks = [
        masking_utils.create_causal_mask(*arguments),
        masking_utils.create_sliding_window_causal_mask(*arguments),
        masking_utils.create_chunked_causal_mask(*arguments),
    ]
    assert [(mask.window, mask.is_chunked, mask.is_known) for mask in masks] == [
        (None, False, True),
        (7, False, True),
        (5, True, True),
    ]
    changed = masking_utils.create_causal_mask(*arguments, or_mask_function=lambda batch, head, query, key: key == 0)
    assert not changed.is_known
    assert masks[1][..., :4].is_known
    assert not (masks[1] + 1).is_known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types(dtype: torch.dtype, root: Path) -> None:
    path = tiny("stablelm", root)
    logits, _ = expected(path)
    tokens = prompts(320)
    actual = Runner(loaded(path, dtype, library.load()), dtype, MAX_LEN).in_chunks(tokens, 1, [len(tokens[1])])
    difference = (actual.float().log_softmax(1) - logits[1].log_softmax(1)).abs().max()
    assert difference < (0.3 if dtype == torch.bfloat16 else 0.04)


def test_engines_give_the_same_bits_alone_in_a_storm_and_from_the_prefix_cache(root: Path) -> None:
    path = tiny("stablelm", root)
    generator = torch.Generator().manual_seed(2)
    start = torch.randint(3, 320, (100,), generator=generator).tolist()
    tails = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (1, 2, 33, 150, 300)]
    params = SamplingParams(seed=5, max_tokens=10, ignore_eos=True, logprobs=2, output_kind=OutputKind.FINAL_ONLY)

    async def ask(client: AsyncClient, prompt: list[int]) -> str:
        (output,) = [output async for output in client.generate(prompt, params)]
        return repr((output.outputs[0].token_ids, output.outputs[0].logprobs))

    async def main() -> tuple[list[str], list[list[str]], str]:
        # A cache that is too small for all: some requests are preempted.
        settings = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 96, "max_num_seqs": 4}
        async with AsyncClient.launch(str(path), **settings, num_gpu_blocks_override=64) as client:
            alone = [await ask(client, start + tail) for tail in tails]
            storms = [list(await asyncio.gather(*(ask(client, start + tail) for tail in tails))) for _ in range(2)]
            return alone, storms, client.facts.model_impl + client.facts.variant_module

    alone, storms, impl = asyncio.run(main())
    assert impl == "transformers"
    assert storms == [alone, alone]


def test_int8_weights(root: Path) -> None:
    config = worker_config(tiny("stablelm", root), quantization="int8")
    model = loaded_as(config)
    assert {weight.product.packed.kind for weight in model.parameters.packed.values()} == {"u8"}
    assert check_batch_invariance(model, config) == ""
