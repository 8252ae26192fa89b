"""GGUF metadata in Hugging Face form: config, generation defaults, tokenizers, and the cache of both."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_tokenizers
from gguf import GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.model_files import read_model_facts
from octavo.frontend.model_files.gguf.config import generation_config, hf_config
from octavo.frontend.model_files.gguf.tokenizer import tokenizer_files
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ModelConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError

LLAMA = {
    "general.architecture": "llama",
    "general.file_type": 1,
    "llama.embedding_length": 48,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 320,
}
GPT2 = {
    "general.architecture": "gpt2",
    "gpt2.embedding_length": 48,
    "gpt2.block_count": 2,
    "gpt2.attention.head_count": 3,
    "gpt2.context_length": 64,
    "gpt2.attention.layer_norm_epsilon": 9.999999747378752e-06,
    "gpt2.vocab_size": 320,
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """Return the tokenizer keys that a converter would write for the small byte-level tokenizer."""
    model = json.loads(small_tokenizers.byte_level()._fast.to_str())
    tokens = [*model["model"]["vocab"], *small_tokenizers.SPECIAL, *small_tokenizers.USER_DEFINED]
    types = [NORMAL] * len(model["model"]["vocab"]) + [CONTROL] * 2 + [USER_DEFINED] * 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Return the tokenizer keys for the small SentencePiece-style tokenizer: scores instead of merges."""
    special = ["<unk>", "<|start|>", "<|end|>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["th", "he", "the", "\u2581the", "\u2581a", "in", "ing", "\u2581", *"thaeing".replace("h", "", 0)]
    pieces = list(dict.fromkeys(pieces))
    tokens = [*special, *byte_tokens, *pieces, *small_tokenizers.USER_DEFINED]
    scores = [0.0] * (len(special) + 256) + [-float(place) for place in range(len(pieces))] + [0.0, 0.0]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED] * 2
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def load(metadata: dict[str, Any], directory: Path) -> Tokenizer:
    for name, content in tokenizer_files(metadata).items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return Tokenizer.load(directory)


class TestConfig:
    def test_llama(self) -> None:
        config = hf_config(LLAMA, {"token_embd.weight", "output.weight"}, {})
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert (config["hidden_size"], config["head_dim"], config["num_key_value_heads"]) == (48, 8, 2)
        assert config["rms_norm_eps"] == 1e-5
        assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
        assert (config["torch_dtype"], config["tie_word_embeddings"]) == ("float16", False)

    def test_what_shows_in_tensors_only(self) -> None:
        config = hf_config(LLAMA, {"blk.0.attn_q.bias"}, {})
        assert (config["tie_word_embeddings"], config["attention_bias"]) == (True, True)

    @pytest.mark.parametrize(("arch", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
    def test_qwen(self, arch: str, name: str) -> None:
        metadata = {key.replace("llama", arch): value for key, value in LLAMA.items()}
        metadata |= {"general.architecture": arch, f"{arch}.attention.key_length": 16}
        config = hf_config(metadata, set(), {})
        assert (config["architectures"], config["head_dim"]) == ([name], 16)

    def test_gpt2(self) -> None:
        config = hf_config(GPT2, set(), {})
        assert config["architectures"] == ["GPT2LMHeadModel"]
        assert (config["n_embd"], config["n_layer"], config["n_head"], config["n_positions"]) == (48, 2, 3, 64)
        assert (config["layer_norm_epsilon"], config["torch_dtype"]) == (1e-5, "bfloat16")

    def test_llama3_frequency_factors_are_recognized(self) -> None:
        theta, head_dim, factor = 500000.0, 64, 32.0
        metadata = LLAMA | {"llama.rope.freq_base": theta, "llama.attention.key_length": head_dim}
        factors = []
        for index in range(0, head_dim, 2):  # Llama 3's rule, as its authors' code states it
            wavelength = 2 * math.pi * theta ** (index / head_dim)
            if wavelength < 8192 / 4:
                factors.append(1.0)
            elif wavelength > 8192 / 1:
                factors.append(factor)
            else:
                smooth = (8192 / wavelength - 1) / (4 - 1)
                factors.append(1 / ((1 - smooth) / factor + smooth))
        scaling = hf_config(metadata, set(), {"rope_freqs.weight": [float(np.float32(value)) for value in factors]})[
            "rope_scaling"
        ]
        assert scaling == {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
            hf_config(metadata, set(), {"rope_freqs.weight": [value + 0.1 for value in factors]})

    def test_scaling_by_keys(self) -> None:
        linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        assert hf_config(LLAMA | linear, set(), {})["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        with pytest.raises(ConfigError, match="'longrope' is not supported"):
            hf_config(LLAMA | linear | {"llama.rope.scaling.type": "longrope"}, set(), {})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"general.architecture": "mamba"}, "'mamba' is not supported"),
            ({"llama.expert_count": 8}, r"no llama\.expert_used_count"),
            ({"llama.expert_shared_count": 1}, r"llama\.expert_shared_count \(1\), which octavo does not know"),
            ({"llama.attention.head_count_kv": [2, 1]}, r"llama\.attention\.head_count_kv differs between layers"),
            ({"llama.attention.value_length": 4}, "keys and values of different sizes"),
            ({"llama.rope.dimension_count": 4}, "4 of 8 dimensions"),
        ],
    )
    def test_unsupported_gguf_features_are_reported(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            hf_config(LLAMA | changes, set(), {})

    def test_experts(self) -> None:
        config = hf_config(LLAMA | {"llama.expert_count": 8, "llama.expert_used_count": 2}, set(), {})
        assert config["architectures"] == ["MixtralForCausalLM"] and config["intermediate_size"] == 96
        assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)
        metadata = {key.replace("llama.", "qwen2moe."): value for key, value in LLAMA.items()} | {
            "general.architecture": "qwen2moe",
            "qwen2moe.expert_count": 60,
            "qwen2moe.expert_used_count": 4,
            "qwen2moe.expert_feed_forward_length": 24,
            "qwen2moe.expert_shared_feed_forward_length": 80,
        }
        config = hf_config(metadata, set(), {})
        assert config["architectures"] == ["Qwen2MoeForCausalLM"] and config["norm_topk_prob"] is False
        assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (24, 80)

    def test_a_missing_key_is_named(self) -> None:
        metadata = {key: value for key, value in LLAMA.items() if key != "llama.block_count"}
        with pytest.raises(ConfigError, match=r"no llama\.block_count"):
            hf_config(metadata, set(), {})

    def test_generation_config(self) -> None:
        ends = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 5}
        assert generation_config(ends | {"general.sampling.temp": 0.5}) == {
            "temperature": 0.5,
            "eos_token_id": [5, 9],
        }


class TestByteLevel:
    @given(st.text(alphabet=st.sampled_from("the a\u00e9\U0001f600<|end|>\n1'"), max_size=20))
    def test_same_ids_as_the_tokenizer_it_came_from(self, text: str) -> None:
        made = Tokenizer(FROM_GGUF)
        assert made.encode(text) == small_tokenizers.byte_level().encode(text)

    def test_special_and_user_defined_tokens(self, tmp_path: Path) -> None:
        tokenizer = load(byte_level_metadata(), tmp_path)
        ids = tokenizer.encode("the<|end|><tool>")
        assert tokenizer.decode(ids) == "the<tool>"
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")

    def test_bos_and_eos_are_added_as_the_file_asks(self, tmp_path: Path) -> None:
        start, end = 263, 264
        assert start not in load(byte_level_metadata(), tmp_path).encode("the")
        tokenizer = load(byte_level_metadata(add_bos_token=True, add_eos_token=True), tmp_path)
        ids = tokenizer.encode("the")
        assert [ids[0], ids[-1]] == [tokenizer.bos_token_id, tokenizer.eos_token_id] == [start, end]
        assert tokenizer.encode("the", add_special_tokens=False) == ids[1:-1]

    @pytest.mark.parametrize(
        ("pre", "text", "words"),
        [
            ("gpt-2", "it's 1234  x\n", ["it", "'s", " 1234", " ", " x", "\n"]),
            ("smollm", "it's 123 x", ["it", "'s", " ", "1", "2", "3", " x"]),
            ("llama-bpe", "IT'S 1234!\n\n", ["IT", "'S", " ", "123", "4", "!\n\n"]),
            ("qwen2", "it's 12!", ["it", "'s", " ", "1", "2", "!"]),
        ],
    )
    def test_pre_tokenizers_cut_as_their_models_do(self, pre: str, text: str, words: list[str]) -> None:
        made = tokenizer_files(byte_level_metadata(pre=pre))
        fast = small_tokenizers.FastTokenizer.from_str(made["tokenizer.json"])
        cut = fast.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in cut] == words

    def test_an_unknown_pre_tokenizer_is_named(self) -> None:
        with pytest.raises(ConfigError, match="'chameleon' is not supported"):
            tokenizer_files(byte_level_metadata(pre="chameleon"))

    def test_merges_are_required(self) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges"):
            tokenizer_files(byte_level_metadata(merges=[]))


FROM_GGUF = small_tokenizers.FastTokenizer.from_str(tokenizer_files(byte_level_metadata())["tokenizer.json"])


class TestSentencePiece:
    def test_merges_follow_the_scores(self, tmp_path: Path) -> None:
        tokenizer = load(sentencepiece_metadata(add_bos_token=False), tmp_path)
        # "th" has a better score than "he", so "the" is th+e wherever it stands.
        assert names(tokenizer, "the thing") == ["\u2581the", "\u2581", "th", "ing"]
        assert tokenizer.decode(tokenizer.encode("the thing")) == "the thing"

    @given(st.text(max_size=20).filter(lambda text: "\u2581" not in text))
    def test_every_text_comes_back(self, text: str) -> None:
        made = small_tokenizers.FastTokenizer.from_str(SENTENCEPIECE_JSON)
        tokenizer = Tokenizer(made)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text

    def test_unknown_characters_become_bytes(self, tmp_path: Path) -> None:
        tokenizer = load(sentencepiece_metadata(), tmp_path)
        assert names(tokenizer, "\u00e9")[-2:] == ["<0xC3>", "<0xA9>"]

    def test_bos_is_added_unless_the_file_says_no(self, tmp_path: Path) -> None:
        assert load(sentencepiece_metadata(), tmp_path).encode("the")[0] == 1
        assert load(sentencepiece_metadata(add_bos_token=False), tmp_path).encode("the")[0] != 1

    def test_no_space_prefix(self, tmp_path: Path) -> None:
        tokenizer = load(sentencepiece_metadata(add_bos_token=False, add_space_prefix=False), tmp_path)
        assert names(tokenizer, "the the") == ["the", "\u2581the"]
        assert tokenizer.decode(tokenizer.encode(" the")) == " the"

    def test_scores_are_required(self) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.scores"):
            tokenizer_files(sentencepiece_metadata(scores=[]))

    def test_removing_white_space_is_rejected(self) -> None:
        with pytest.raises(ConfigError, match="white space"):
            tokenizer_files(sentencepiece_metadata(remove_extra_whitespaces=True))


SENTENCEPIECE_JSON = tokenizer_files(sentencepiece_metadata())["tokenizer.json"]


def names(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer._fast.id_to_token(token_id) for token_id in tokenizer.encode(text)]


def test_other_vocabularies_are_rejected() -> None:
    with pytest.raises(ConfigError, match="'bert' is not supported"):
        tokenizer_files(byte_level_metadata(model="bert"))


def test_chat_templates(tmp_path: Path) -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "A"}
    assert load(metadata, tmp_path).chat_templates == {"default": "A"}
    metadata |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "B"}
    assert load(metadata, tmp_path).chat_templates == {"default": "A", "tool_use": "B"}


class TestFile:
    @pytest.fixture
    def env(self, tmp_path: Path) -> Env:
        cache = tmp_path / "cache"
        return Env(
            cache_dir=cache, log_level="INFO", api_key=None, check_invariants=False, runtime_dir=cache, is_offline=True
        )

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """Return a small but complete GGUF file."""
        path = tmp_path / "small.gguf"
        writer = GGUFWriter(path, "llama")
        for key, value in (LLAMA | byte_level_metadata()).items():
            if key == "general.architecture":
                continue
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
                writer.add_key_value(key, value, kinds[type(value)])
        writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def test_facts(self, file: Path, env: Env) -> None:
        facts = read_model_facts(ModelConfig(model=str(file)), env)
        assert (facts.model_path, facts.load_format) == (str(file), "gguf")
        assert (facts.architecture, facts.vocab_size) == ("LlamaForCausalLM", 267)
        assert facts.eos_token_ids == [264]
        assert Tokenizer.load(facts.tokenizer_path).decode([256, 257]) == " the"

    def test_the_second_start_does_not_open_the_file(
        self, file: Path, env: Env, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = read_model_facts(ModelConfig(model=str(file)), env)
        monkeypatch.setattr("gguf.GGUFReader", None)
        assert read_model_facts(ModelConfig(model=str(file)), env) == first

    def test_a_changed_file_is_converted_again(self, file: Path, env: Env) -> None:
        first = read_model_facts(ModelConfig(model=str(file)), env)
        with file.open("ab") as stream:
            stream.write(b"\0" * 32)
        assert read_model_facts(ModelConfig(model=str(file)), env).tokenizer_path != first.tokenizer_path

    def test_concurrent_starts_read_the_same_facts(self, file: Path, env: Env) -> None:
        with ThreadPoolExecutor(4) as pool:
            facts = list(pool.map(lambda _: read_model_facts(ModelConfig(model=str(file)), env), range(4)))
        assert all(one == facts[0] for one in facts)
        assert [path.name for path in (env.cache_dir / "gguf").iterdir()] == [Path(facts[0].tokenizer_path).name]

    @pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 10])
    def test_a_file_that_is_no_gguf(self, content: bytes, tmp_path: Path, env: Env) -> None:
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a readable GGUF file") as caught:
            read_model_facts(ModelConfig(model=str(path)), env)
        assert "\n" not in caught.value.message

    def test_a_truncated_file(self, file: Path, tmp_path: Path, env: Env) -> None:
        path = tmp_path / "cut.gguf"
        path.write_bytes(file.read_bytes()[:3000])
        with pytest.raises(ConfigError, match="not a readable GGUF file"):
            read_model_facts(ModelConfig(model=str(path)), env)

    def test_a_cache_that_cannot_be_written(self, file: Path, tmp_path: Path, env: Env) -> None:
        env.cache_dir.write_text("a file where a directory should be")
        with pytest.raises(ConfigError, match="cannot write") as caught:
            read_model_facts(ModelConfig(model=str(file)), env)
        assert "OCTAVO_CACHE" in caught.value.hint
