"""Finding a model and reading its facts: directories, hub ids, and errors that end in one line with a hint."""

import json
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import msgspec
import pytest
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.frontend.model_files import locate_model, read_model_facts
from octavo.frontend.model_files.locate import locate_tokenizer
from octavo.protocol.config import ModelConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
    "eos_token_id": 7,
}

MISTRAL = {
    "dim": 48,
    "n_layers": 2,
    "hidden_dim": 96,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 8,
    "norm_eps": 1e-5,
    "vocab_size": 320,
    "rope_theta": 1e6,
}


def environment(cache_dir: Path, *, is_offline: bool = False) -> Env:
    return Env(
        cache_dir=cache_dir,
        log_level="INFO",
        api_key=None,
        check_invariants=False,
        runtime_dir=cache_dir,
        is_offline=is_offline,
    )


@pytest.fixture
def env(tmp_path: Path) -> Env:
    return environment(tmp_path / "cache")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a directory in Hugging Face layout, with an empty weights file."""
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory, LLAMA)
    (directory / "model.safetensors").touch()
    return directory


def write(directory: Path, config: dict[str, Any], name: str = "config.json") -> None:
    (directory / name).write_text(json.dumps(config))


def facts_of(home: Path, env: Env, **changes: Any) -> Any:
    return read_model_facts(ModelConfig(model=str(home), **changes), env)


class TestLocate:
    def test_a_directory_and_a_file(self, home: Path, env: Env) -> None:
        assert locate_model(ModelConfig(model=str(home)), env) == home
        (home / "one.gguf").touch()
        assert locate_model(ModelConfig(model=str(home)), env) == home
        assert locate_model(ModelConfig(model=str(home / "one.gguf")), env) == home / "one.gguf"

    def test_a_directory_with_nothing_but_a_gguf_is_that_file(self, tmp_path: Path, env: Env) -> None:
        (tmp_path / "one.gguf").touch()
        assert locate_model(ModelConfig(model=str(tmp_path)), env) == tmp_path / "one.gguf"
        (tmp_path / "two.gguf").touch()
        with pytest.raises(ConfigError, match=r"one\.gguf, two\.gguf"):
            locate_model(ModelConfig(model=str(tmp_path)), env)

    @pytest.mark.parametrize("name", ["./absent", "/no/such/model", "~/no-such-model", "a/b/c", "x.gguf", "o/x.gguf"])
    def test_a_missing_path(self, name: str, env: Env) -> None:
        with pytest.raises(ConfigError, match="no such file or directory"):
            locate_model(ModelConfig(model=name), env)

    def test_a_hub_id_in_the_cache(self, tmp_path: Path, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        snapshot = fill_hub_cache(tmp_path / "hub", monkeypatch, ["config.json", "model.safetensors"])
        assert locate_model(ModelConfig(model="org/name"), environment(tmp_path, is_offline=True)) == snapshot

    def test_a_cached_hub_id_without_weights_is_enough_for_dummy_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = fill_hub_cache(tmp_path / "hub", monkeypatch, ["config.json"])
        offline = environment(tmp_path, is_offline=True)
        assert locate_model(ModelConfig(model="org/name", load_format="dummy"), offline) == snapshot
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
            locate_model(ModelConfig(model="org/name"), offline)

    def test_an_interrupted_download_is_not_taken_for_the_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = fill_hub_cache(tmp_path / "hub", monkeypatch, ["config.json", "a.safetensors"])
        write(snapshot, {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}, "model.safetensors.index.json")
        offline = environment(tmp_path, is_offline=True)
        with pytest.raises(ConfigError, match="nor complete in the hub cache"):
            locate_model(ModelConfig(model="org/name"), offline)
        (snapshot / "b.safetensors").touch()
        assert locate_model(ModelConfig(model="org/name"), offline) == snapshot

    def test_offline_says_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ConfigError, match="org/name is neither") as caught:
            locate_model(ModelConfig(model="org/name"), environment(tmp_path, is_offline=True))
        assert "hf download org/name" in caught.value.hint

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (huggingface_hub.errors.RepositoryNotFoundError, "no model named org/name"),
            (huggingface_hub.errors.GatedRepoError, "gated"),
            (huggingface_hub.errors.RevisionNotFoundError, "no revision 'v2'"),
            (huggingface_hub.errors.HfHubHTTPError, "the download failed: first line"),
            (LocalEntryNotFoundError, "the download failed: first line"),
        ],
    )
    def test_errors_of_the_hub_have_a_remedy(
        self, error: type[Exception], message: str, env: Env, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def reject(*_: object, local_files_only: bool = False, **__: object) -> str:
            if local_files_only or error is LocalEntryNotFoundError:
                raise LocalEntryNotFoundError("first line\nsecond line")
            response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
            raise error("first line\nsecond line", response=response)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", reject)
        with pytest.raises(ConfigError, match=message) as caught:
            locate_model(ModelConfig(model="org/name", revision="v2"), env)
        assert "\n" not in caught.value.message

    def test_a_download(self, tmp_path: Path, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def download(name: str, *, local_files_only: bool = False, **options: Any) -> str:
            if local_files_only:
                raise LocalEntryNotFoundError("not here")
            asked.append((name, options["revision"], "*.safetensors" in options["allow_patterns"]))
            (tmp_path / "model.safetensors").touch()
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert locate_model(ModelConfig(model="org/name", revision="v2"), env) == tmp_path
        assert locate_tokenizer(ModelConfig(model="org/name", tokenizer="org/other"), env) == tmp_path
        assert asked == [("org/name", "v2", True), ("org/other", None, False)]

    def test_settings_reach_the_hub_client(self, tmp_path: Path, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def download(name: str, **options: Any) -> str:
            asked.append((name, options["revision"], options["cache_dir"], options["token"]))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        (tmp_path / "model.safetensors").touch()
        config = ModelConfig(
            model="org/name",
            revision="v2",
            tokenizer="org/name",
            hf_token="hf_secret",
            download_dir="/models",
        )
        locate_model(config, env)
        locate_tokenizer(config, env)
        locate_tokenizer(msgspec.structs.replace(config, tokenizer_revision="v3"), env)
        assert asked == [("org/name", revision, "/models", "hf_secret") for revision in ("v2", "v2", "v3")]


def fill_hub_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> Path:
    """Lay out a hub cache that holds one commit of org/name; return its snapshot directory."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for name in names:
        (snapshot / name).touch()
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(cache))
    return snapshot


class TestFacts:
    def test_a_llama_directory(self, home: Path, env: Env) -> None:
        facts = facts_of(home, env)
        assert facts.model_path == facts.tokenizer_path == str(home)
        assert facts.load_format == facts_of(home, env, load_format="hf").load_format == "safetensors"
        assert facts.architecture == "LlamaForCausalLM"
        assert facts.hf_config == LLAMA
        assert (facts.vocab_size, facts.num_layers, facts.num_heads, facts.num_kv_heads) == (320, 2, 6, 2)
        assert (facts.head_dim, facts.max_position_embeddings) == (8, 128)
        assert facts.checkpoint_dtype == "float16"
        assert facts.eos_token_ids == [7]
        assert facts.generation_defaults == {}

    def test_gpt2_names(self, home: Path, env: Env) -> None:
        config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 5, "n_embd": 12, "n_layer": 3, "n_head": 4}
        write(home, config | {"n_positions": 64})
        facts = facts_of(home, env)
        assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (3, 4, 4, 3)
        assert facts.max_position_embeddings == 64
        assert facts.checkpoint_dtype == "float32"
        assert facts.eos_token_ids == []

    def test_head_dim_and_dtype_as_newer_files_write_them(self, home: Path, env: Env) -> None:
        write(home, LLAMA | {"head_dim": 16, "dtype": "torch.bfloat16", "num_key_value_heads": None})
        facts = facts_of(home, env)
        assert (facts.head_dim, facts.checkpoint_dtype, facts.num_kv_heads) == (16, "bfloat16", 6)

    def test_yarn_raises_the_number_of_positions(self, home: Path, env: Env) -> None:
        rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        write(home, LLAMA | {"rope_scaling": rope})
        assert facts_of(home, env).max_position_embeddings == 512

    def test_settings_win_over_the_files(self, home: Path, env: Env) -> None:
        write(home, {"temperature": 0.6, "top_k": 20, "eos_token_id": 3}, "generation_config.json")
        for spelled in (json.dumps, dict):
            facts = facts_of(
                home,
                env,
                hf_overrides=spelled({"max_position_embeddings": 64, "rope_theta": 5.0}),
                override_generation_config=spelled({"top_k": 5, "eos_token_id": [4]}),
            )
            assert facts.hf_config == LLAMA | {"max_position_embeddings": 64, "rope_theta": 5.0}
            assert (facts.max_position_embeddings, facts.eos_token_ids) == (64, [4])
            assert facts.generation_defaults == {"temperature": 0.6, "top_k": 5}
        alone = facts_of(home, env, generation_config="vllm", override_generation_config='{"top_p": 0.5}')
        assert alone.generation_defaults == {"top_p": 0.5}

    @pytest.mark.parametrize("name", ["hf_overrides", "override_generation_config"])
    def test_settings_that_are_no_json_object(self, name: str, home: Path, env: Env) -> None:
        for text in ("[1]", "{"):
            with pytest.raises(ConfigError, match=f"{name} is not a JSON object"):
                facts_of(home, env, **{name: text})

    def test_older_checkpoints_say_elsewhere_how_they_are_quantized(self, home: Path, env: Env) -> None:
        for name, method in {"quantize_config.json": "gptq", "quant_config.json": "awq"}.items():
            write(home, {"bits": 4}, name)
            assert facts_of(home, env).hf_config["quantization_config"] == {"quant_method": method, "bits": 4}
            (home / name).unlink()
        producer, quantization = {"name": "modelopt"}, {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        write(home, {"producer": producer, "quantization": quantization}, "hf_quant_config.json")
        assert facts_of(home, env).hf_config["quantization_config"] == {"quant_method": "modelopt", **quantization}
        (home / "hf_quant_config.json").unlink()
        write(home, LLAMA | {"compression_config": {"quant_method": "compressed-tensors"}})
        assert facts_of(home, env).hf_config["quantization_config"] == {"quant_method": "compressed-tensors"}
        write(home, LLAMA | {"quantization_config": {"quant_library": "modelopt", "quant_algo": "FP8"}})
        assert facts_of(home, env).hf_config["quantization_config"]["quant_method"] == "modelopt"
        write(home, LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 8}})
        write(home, {"bits": 4}, "quantize_config.json")
        assert facts_of(home, env).hf_config["quantization_config"]["bits"] == 8

    def test_a_file_of_modelopt_without_an_object(self, home: Path, env: Env) -> None:
        write(home, {"quantization": None}, "hf_quant_config.json")
        with pytest.raises(ConfigError, match=r"hf_quant_config\.json: 'quantization' is None"):
            facts_of(home, env)

    def test_generation_config_gives_defaults_and_stop_tokens(self, home: Path, env: Env, tmp_path: Path) -> None:
        generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True, "eos_token_id": [3, 4]}
        write(home, generation, "generation_config.json")
        defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
        assert facts_of(home, env).generation_defaults == defaults
        assert facts_of(home, env).eos_token_ids == [3, 4]
        none = facts_of(home, env, generation_config="vllm")
        assert (none.generation_defaults, none.eos_token_ids) == ({}, [3, 4])
        write(tmp_path, {"top_p": 0.5}, "generation_config.json")
        assert facts_of(home, env, generation_config=str(tmp_path)).generation_defaults == {"top_p": 0.5}
        with pytest.raises(ConfigError, match=r"no generation_config\.json in"):
            facts_of(home, env, generation_config=str(tmp_path / "absent"))

    def test_a_tokenizer_of_another_directory(self, home: Path, env: Env, tmp_path: Path) -> None:
        assert facts_of(home, env, tokenizer=str(tmp_path)).tokenizer_path == str(tmp_path)

    def test_dummy_weights_need_the_config_alone(self, home: Path, env: Env) -> None:
        (home / "model.safetensors").unlink()
        assert facts_of(home, env, load_format="dummy").load_format == "dummy"
        with pytest.raises(ConfigError, match="no weights in"):
            facts_of(home, env)

    def test_the_format_of_the_weights_is_found(self, home: Path, env: Env) -> None:
        (home / "consolidated.safetensors").touch()
        (home / "pytorch_model.bin").touch()
        assert facts_of(home, env).load_format == "safetensors"
        assert facts_of(home, env, load_format="pt").load_format == "pt"
        assert facts_of(home, env, load_format="mistral").load_format == "mistral"
        (home / "model.safetensors").unlink()
        assert facts_of(home, env).load_format == "pt"
        (home / "pytorch_model.bin").rename(home / "training_args.bin")
        assert facts_of(home, env).load_format == "mistral"
        with pytest.raises(ConfigError, match=r"no weights in .*: none for --load-format pt"):
            facts_of(home, env, load_format="pt")

    def test_params_are_read_without_a_config(self, home: Path, env: Env) -> None:
        (home / "config.json").rename(home / "kept")
        (home / "consolidated.safetensors").touch()
        write(home, MISTRAL, "params.json")
        facts = facts_of(home, env)
        assert (facts.architecture, facts.load_format) == ("MistralForCausalLM", "mistral")
        assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.eos_token_ids) == (6, 2, 8, [2])
        assert facts.max_position_embeddings == 128_000
        assert facts.hf_config["rope_theta"] == 1e6 and facts.hf_config["sliding_window"] is None
        (home / "kept").rename(home / "config.json")
        assert facts_of(home, env).architecture == "LlamaForCausalLM"
        moe = {"num_experts": 8, "num_experts_per_tok": 2}
        write(home, {**MISTRAL, "moe": moe, "sliding_window": 4096, "rope_theta": None}, "params.json")
        facts = facts_of(home, env, config_format="mistral")
        assert (facts.architecture, facts.load_format) == ("MixtralForCausalLM", "mistral")
        assert (facts.hf_config["num_local_experts"], facts.hf_config["rope_theta"]) == (8, 10000.0)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dim": None}, "'dim'|hidden_size"),
            ({"rope_theta": None}, "no rope_theta"),
            ({"yarn": {"factor": 4}}, r"has yarn \({'factor': 4}\), which octavo does not know"),
            ({"use_biases": True}, "use_biases"),
            ({"moe": {"num_experts": 8}}, "has moe"),
        ],
    )
    def test_params_that_cannot_be_used(self, home: Path, env: Env, changes: dict[str, Any], message: str) -> None:
        write(home, MISTRAL | changes, "params.json")
        with pytest.raises(ConfigError, match=message):
            facts_of(home, env, config_format="mistral")

    def test_params_that_are_missing(self, home: Path, env: Env) -> None:
        with pytest.raises(ConfigError, match=r"no params\.json in"):
            facts_of(home, env, config_format="mistral")
        write(home, {"dim": 48}, "params.json")
        with pytest.raises(
            ConfigError, match=r"params\.json has no hidden_dim, n_heads, n_layers, norm_eps, vocab_size"
        ):
            facts_of(home, env, config_format="mistral")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": None}, "names no architectures"),
            ({"architectures": []}, "names no architectures"),
            ({"vocab_size": None}, "vocab_size must be a positive integer, not None"),
            ({"num_attention_heads": "6"}, "num_attention_heads must be a positive integer, not '6'"),
            ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
            ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn are not supported"),
            ({"eos_token_id": ["</s>"]}, "eos_token_id must be a token id"),
        ],
    )
    def test_a_config_that_cannot_be_used(self, home: Path, env: Env, changes: dict[str, Any], message: str) -> None:
        write(home, LLAMA | changes)
        with pytest.raises(ConfigError, match=message):
            facts_of(home, env)

    @pytest.mark.parametrize("text", ["{", "[]", "\xff"])
    def test_a_config_that_is_no_json_object(self, home: Path, env: Env, text: str) -> None:
        (home / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"config\.json") as caught:
            facts_of(home, env)
        assert "\n" not in caught.value.message

    def test_no_config(self, home: Path, env: Env) -> None:
        (home / "config.json").unlink()
        with pytest.raises(ConfigError, match=r"no config\.json in"):
            facts_of(home, env)

    def test_load_formats_that_do_not_fit(self, home: Path, env: Env) -> None:
        with pytest.raises(ConfigError, match="--load-format gguf"):
            facts_of(home, env, load_format="gguf")
        (home / "x.gguf").touch()
        with pytest.raises(ConfigError, match="--load-format safetensors"):
            facts_of(home / "x.gguf", env, load_format="safetensors")
        with pytest.raises(ConfigError, match=r"neither a directory nor a \.gguf file"):
            facts_of(home / "config.json", env)
