"""The configuration tree: sources, errors that name the setting, and resolution."""

from typing import Any

import msgspec
import pytest

from octavo.protocol.config import EngineConfig, ModelConfig, ModelFacts, ResolvedConfig, SchedulerConfig, resolve
from octavo.protocol.config.sources import (
    engine_config,
    engine_fields,
    parse_size,
    server_config,
    server_fields,
)
from octavo.protocol.errors import ConfigError

FACTS = ModelFacts(
    model_path="/m",
    tokenizer_path="/m",
    load_format="safetensors",
    architecture="LlamaForCausalLM",
    hf_config={},
    vocab_size=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=2048,
    checkpoint_dtype="float32",
    eos_token_ids=[2],
)


def resolved(**settings: object):
    return resolve(engine_config({"model": "m", **settings}), FACTS, device="cpu", num_cores=2)


@pytest.mark.parametrize(
    ("text", "number"),
    [("32", 32), ("32k", 32_000), ("32K", 32_768), ("1.5G", 3 * 2**29), ("4GiB", 4 * 2**30), ("2m", 2_000_000)],
)
def test_sizes(text: str, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1x", "1e3", "3.5", "0.0001k"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


def test_a_setting_belongs_to_one_branch() -> None:
    names = [info.name for info in [*engine_fields(), *server_fields()]]
    assert len(names) == len(set(names))


def test_aliases_mean_their_setting() -> None:
    assert engine_config({"model": "m", "max_num_queued_requests": 7}).scheduler.max_num_queued_reqs == 7
    assert server_config({"disable_uvicorn_access_log": False}).disable_access_log is False
    with pytest.raises(ConfigError, match="max_num_queued_re"):
        engine_config({"model": "m", "max_num_queued_requests": 7, "max_num_queued_reqs": 7})
    fields = [*engine_fields(), *server_fields()]
    assert not {info.name for info in fields} & {alias for info in fields for alias in info.aliases}


def test_every_setting_is_described() -> None:
    assert all(info.description for info in [*engine_fields(), *server_fields()])


def test_flat_settings_reach_their_branch() -> None:
    config = engine_config({"model": "m", "block_size": 32, "max_num_seqs": 3})
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 3)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("block_size", 0), ("block_size", "x"), ("gpu_memory_utilization", 1.5), ("scheduling_policy", "lifo")],
)
def test_a_bad_value_names_its_setting(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        engine_config({"model": "m", setting: value})


def test_an_empty_api_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="api_key"):
        server_config({"api_key": [""]})
    assert server_config({"api_key": ["k"]}).api_key == ["k"]


def test_an_unknown_setting_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config({"model": "m", "max_model_length": 5})
    assert "max_model_len" in caught.value.hint


def test_defaults_on_a_cpu() -> None:
    config = resolved()
    assert (config.max_model_len, config.fits_model_len) == (2048, False)
    assert (config.dtype, config.num_threads, config.max_num_seqs) == ("bfloat16", 2, 256)
    assert config.max_num_batched_tokens >= config.max_num_seqs
    assert config.served_model_names == ["m"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "on cuda"),
        ({"pipeline_parallel_size": 2}, "with several pipeline stages"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "with --speculative-config"),
        ({"logits_processors": ["a:B"]}, "with logits processors"),
    ],
)
def test_several_steps_share_a_plan_where_that_is_possible(settings: dict[str, Any], message: str) -> None:
    assert [resolved(num_scheduler_steps=number).num_scheduler_steps for number in (None, 1, 3)] == [8, 1, 3]
    assert [resolved(num_scheduler_steps=number, **settings).num_scheduler_steps for number in (None, 1)] == [1, 1]
    with pytest.raises(ConfigError, match=message):
        resolved(num_scheduler_steps=3, **settings)


def test_auto_model_len_is_left_to_the_memory() -> None:
    assert resolved(max_model_len="auto").fits_model_len
    assert resolved(max_model_len=-1).fits_model_len


def test_model_len_is_bounded_by_the_model() -> None:
    assert resolved(max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="2048"):
        resolved(max_model_len=4096)


def test_the_budget_must_hold_every_sequence() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        resolved(max_num_seqs=64, max_num_batched_tokens=32)


def test_dtype_aliases() -> None:
    assert resolved(dtype="half").dtype == "float16"
    assert resolved(dtype="float").dtype == "float32"


def test_resolve_is_pure() -> None:
    config = EngineConfig(model=ModelConfig(model="m"), scheduler=SchedulerConfig(max_num_seqs=2))
    first = resolve(config, FACTS, device="cpu", num_cores=2)
    assert resolve(config, FACTS, device="cpu", num_cores=2) == first


@pytest.mark.parametrize(
    ("setting", "value", "hint"),
    [
        (
            "quantization",
            "exl3",
            "one of none, w8a8, int8, int4, gguf, gptq, awq, compressed-tensors, fp8, bitsandbytes, torchao, mxfp4, "
            "modelopt, auto-round, quark, gptq_marlin, awq_marlin, fbgemm_fp8, modelopt_fp4",
        ),
        ("kv_cache_dtype", "fp4", "one of auto, bfloat16, float16, float32, int8, fp8, fp8_e4m3, fp8_e5m2"),
        ("max_model_len", "long", "see octavo serve --help"),
    ],
)
def test_a_word_that_is_no_choice_gets_the_choices(setting: str, value: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=setting) as caught:
        engine_config({"model": "m", setting: value})
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("load_format", "settings", "expected"),
    [
        ("safetensors", {}, "none"),
        ("safetensors", {"quantization": "int8"}, "int8"),
        ("dummy", {"quantization": "int4"}, "int4"),
        ("gguf", {}, "gguf"),
        ("gguf", {"dtype": "float16"}, "gguf"),
        ("gguf", {"dtype": "float32"}, "none"),
        ("gguf", {"dtype": "float32", "quantization": "gguf"}, "gguf"),
        ("gguf", {"quantization": "none"}, "none"),
        ("gguf", {"quantization": "int4"}, "int4"),
    ],
)
def test_weights_of_a_gguf_file_stay_quantized_unless_told_otherwise(
    load_format: str, settings: dict[str, str], expected: str
) -> None:
    facts = msgspec.structs.replace(FACTS, load_format=load_format)
    config = resolve(engine_config({"model": "m", **settings}), facts, device="cpu", num_cores=2)
    assert config.quantization == expected


def test_only_gguf_files_have_a_quantization_of_their_own() -> None:
    with pytest.raises(ConfigError, match="weights are safetensors"):
        resolved(quantization="gguf")


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def quantized(section: dict[str, Any] | None, load_format: str = "safetensors", **settings: str) -> str:
    hf_config = {**FACTS.hf_config, **({"quantization_config": section} if section else {})}
    facts = msgspec.structs.replace(FACTS, load_format=load_format, hf_config=hf_config)
    return resolve(engine_config({"model": "m", **settings}), facts, device="cpu", num_cores=2).quantization


def test_a_checkpoint_keeps_its_quantization() -> None:
    names = {"gptq": "gptq", "awq": "awq", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "modelopt_fp4": "modelopt"}
    for method, name in names.items():
        section = {"quant_method": method}
        assert quantized(section) == quantized(section, "dummy") == quantized(section, quantization=method) == name
        assert quantized(section, dtype="float32") == quantized(section, quantization="none") == "none"
        assert quantized(section, quantization="int4") == "int4"
    assert quantized({"quant_method": "awq"}, quantization="awq_marlin") == "awq"
    assert quantized({"load_in_8bit": True}) == "bitsandbytes"
    assert quantized({"quant_method": "intel/auto-round"}, quantization="auto-round") == "auto-round"
    assert quantized(None, quantization="fp8") == "fp8"
    assert quantized(None, quantization="bitsandbytes") == "bitsandbytes"


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ({"quant_method": "awq"}, {"quantization": "gptq"}, r"quantization gptq, but .* quantized otherwise \(awq\)"),
        ({"quant_method": "gptq"}, {"quantization": "fp8"}, r"quantized otherwise \(gptq\)"),
        (None, {"quantization": "awq"}, "quantization awq, but the checkpoint is not quantized"),
        ({"quant_method": "hqq"}, {}, r"quantized \(hqq\), which is not supported"),
        ({"quant_method": "gptq"}, {"load_format": "pt"}, r"quantized \(gptq\), and its weights are pt"),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT8 | {"type": "int"}},
            {},
            "'kv_cache_scheme' .* asks for .*'type': 'int'",
        ),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, {}, "asks for .*'type': 'NVFP4'"),
    ],
)
def test_other_quantizations_are_refused(section: Any, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantized(section, settings.pop("load_format", "safetensors"), **settings)


def test_the_cache_has_the_type_of_the_model_or_int8() -> None:
    assert resolved().kv_cache_dtype == "bfloat16"
    assert resolved(dtype="float").kv_cache_dtype == "float32"
    assert resolved(kv_cache_dtype="int8").kv_cache_dtype == "int8"
    assert resolved(kv_cache_dtype="float16", dtype="half").kv_cache_dtype == "float16"
    with pytest.raises(ConfigError, match="kv_cache_dtype float32 with a model of bfloat16 on cpu") as caught:
        resolved(kv_cache_dtype="float32")
    assert "int8" in caught.value.hint


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT8},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
            "layer_quant_config": {
                layer: {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
                for layer in ("*k_proj", "*v_proj")
            },
        },
    ],
)
def test_a_checkpoint_with_scales_for_a_cache_of_8_bit_floats_has_one(section: dict[str, Any]) -> None:
    hf_config = {**FACTS.hf_config, "quantization_config": section}
    facts = msgspec.structs.replace(FACTS, load_format="safetensors", hf_config=hf_config)

    def cache(device: str, kv_cache_dtype: str) -> str:
        said = engine_config({"model": "m", "kv_cache_dtype": kv_cache_dtype})
        return resolve(said, facts, device=device, num_cores=1).kv_cache_dtype

    assert cache("cuda", "auto") == cache("cuda", "fp8") == cache("cpu", "auto") == "fp8"
    assert cache("cuda", "int8") == cache("cpu", "int8") == "int8"
    assert cache("cuda", "bfloat16") == cache("cpu", "bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match="fp8_e5m2"):
        cache("cuda", "fp8_e5m2")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_scales_of_a_cache_are_measured_or_given(device: str) -> None:
    def resolve_with(section: dict[str, Any] | None, kv_cache_dtype: str, **settings: Any) -> ResolvedConfig:
        hf_config = {**FACTS.hf_config, **({"quantization_config": section} if section else {})}
        facts = msgspec.structs.replace(FACTS, load_format="safetensors", hf_config=hf_config)
        settings = {"model": "m", "kv_cache_dtype": kv_cache_dtype, "calculate_kv_scales": True} | settings
        return resolve(engine_config(settings), facts, device=device, num_cores=1)

    for word in ("fp8", "fp8_e4m3"):
        config = resolve_with(None, word)
        assert (config.kv_cache_dtype, config.calculate_kv_scales) == ("fp8", True)
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT8}
    for section, dtype, message in [
        (None, "auto", "bfloat16 has no scales"),
        (None, "int8", "each int8 key and value has a scale of its own"),
        (scheme, "auto", "the checkpoint has scales"),
        (scheme, "bfloat16", "bfloat16 has no scales"),
    ]:
        with pytest.raises(ConfigError, match=f"--calculate-kv-scales: .*{message}"):
            resolve_with(section, dtype)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("quantization", "w8a8"), ("quantization", "int4"), ("kv_cache_dtype", "int8"), ("kv_cache_dtype", "fp8")],
)
def test_torch_leaves_out_what_needs_native_kernels(setting: str, value: str) -> None:
    flag = f"--{setting.replace('_', '-')} {value}"
    with pytest.raises(ConfigError, match=f"{flag} needs the native kernels, which --cpu-kernels torch") as caught:
        resolved(cpu_kernels="torch", **{setting: value})
    assert "--cpu-kernels torch" in caught.value.hint


def test_threads_are_bound_to_no_core_unless_told() -> None:
    assert (resolved().cpu_binding, resolved().cpu_kernels) == ("none", "auto")
    compact = resolved(cpu_binding="compact", num_threads=1)
    assert (compact.cpu_binding, compact.num_threads) == ("compact", 1)
    listed = resolved(cpu_binding="0-2,5")
    assert (listed.cpu_binding, listed.num_threads) == ([0, 1, 2, 5], 4)
    assert resolved(cpu_binding="0-2,5", num_threads=2).num_threads == 2


def test_a_binding_needs_a_core_for_each_thread() -> None:
    with pytest.raises(ConfigError, match="2 cores for num_threads 3") as caught:
        resolved(cpu_binding="0,1", num_threads=3)
    assert "--num-threads 2" in caught.value.hint
    with pytest.raises(ConfigError, match="'spread' is not a list of cores") as caught:
        resolved(cpu_binding="spread")
    assert "compact" in caught.value.hint


def test_the_settings_of_structured_output() -> None:
    plain = resolved().structured_output
    assert (plain.disable_any_whitespace, plain.disable_additional_properties) == (False, False)
    text = '{"backend": "guidance", "disable_fallback": true, "disable_any_whitespace": true}'
    said = resolved(structured_outputs_config=text, max_grammar_bytes=100, grammar_timeout=9).structured_output
    assert (said.disable_any_whitespace, said.disable_additional_properties) == (True, False)
    assert (said.max_grammar_bytes, said.grammar_timeout_s) == (100, 9)


@pytest.mark.parametrize("backend", ["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"])
def test_vllms_backends_of_structured_output_are_accepted(backend: str) -> None:
    said = resolved(
        structured_outputs_config=f'{{"backend": "{backend}", "disable_any_whitespace": true}}'
    ).structured_output
    assert said.disable_any_whitespace


@pytest.mark.parametrize("text", ["{", "[]", '{"backend": "invented"}', '{"reasoning": 1}'])
def test_settings_of_structured_output_that_mean_nothing_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="structured_outputs_config") as caught:
        resolved(structured_outputs_config=text)
    assert "disable_any_whitespace" in caught.value.hint


def test_sizes_that_do_not_divide_a_model_fail_before_anything_starts() -> None:
    facts = msgspec.structs.replace(FACTS, num_heads=8, num_kv_heads=2, hf_config={"intermediate_size": 64})
    two, three = (engine_config({"model": "m", "tensor_parallel_size": size}) for size in (2, 3))
    assert resolve(two, facts, device="cpu", num_cores=2).tensor_parallel_size == 2
    with pytest.raises(ConfigError, match="3 does not divide the model's num_attention_heads") as raised:
        resolve(three, facts, device="cpu", num_cores=2)
    assert raised.value.hint == "use one of 1, 2, 4, 8"


def test_what_cannot_be_tp_invariant_is_refused() -> None:
    flag = {"model": "m", "enable_tp_invariant_inference": True}
    facts = msgspec.structs.replace(FACTS, num_heads=24, num_kv_heads=24, hf_config={"intermediate_size": 96})
    mixture = msgspec.structs.replace(facts, hf_config={"intermediate_size": 96, "num_local_experts": 8})
    whole = {"tensor_parallel_size": 8, "enable_expert_parallel": True}
    for settings, model, device in [({}, facts, "cuda"), ({"tensor_parallel_size": 8}, facts, "cpu")]:
        found = resolve(engine_config({**flag, **settings}), model, device=device, num_cores=8)
        assert found.enable_tp_invariant_inference
    resolve(engine_config({**flag, **whole}), mixture, device="cuda", num_cores=8)
    for settings, model, device, hint in [
        ({"tensor_parallel_size": 3}, facts, "cuda", "use --tensor-parallel-size 1, 2, 4 or 8"),
        ({"cpu_kernels": "torch"}, facts, "cpu", "leave out --cpu-kernels torch"),
        ({"enable_deterministic_inference": False}, facts, "cuda", "leave out --no-enable-deterministic-inference"),
        ({"tensor_parallel_size": 2}, mixture, "cuda", "use --enable-expert-parallel"),
    ]:
        with pytest.raises(ConfigError, match="--enable-tp-invariant-inference: ") as raised:
            resolve(engine_config({**flag, **settings}), model, device=device, num_cores=8)
        assert raised.value.hint.startswith(hint)


def test_host_memory_for_evicted_blocks() -> None:
    assert resolved().kv_offloading_bytes == 0
    assert resolved(kv_offloading_size=1.5).kv_offloading_bytes == 3 * 2**29
    assert resolved(swap_space=1, tensor_parallel_size=2, num_threads=1).kv_offloading_bytes == 2 * 2**30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swap_space": 1}, "both set the same size"),
        ({"enable_prefix_caching": False}, "needs the prefix cache"),
        ({"block_size": 8}, "multiple of 16 tokens"),
    ],
    ids=["twice", "no prefix cache", "small blocks"],
)
def test_blocks_that_cannot_be_offloaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(kv_offloading_size=2, **settings)
    assert caught.value.hint
