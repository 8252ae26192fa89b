"""Which models pool, and how: their files, `--runner`, `--convert` and `--pooler-config`."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import byte_level

from octavo.frontend.model_files import read_model_facts
from octavo.protocol.config import ModelConfig, resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.pooling import DenseLayer, PoolingFacts

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
NORMALIZE = {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}


class Model:
    """The folder of a model, file by file."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        (home / "model.safetensors").touch()

    def write(self, name: str, value: Any) -> None:
        file = self.home / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(value))

    def facts(self, architecture: str, hf_config: dict[str, Any] | None = None, **settings: Any) -> PoolingFacts | None:
        self.write("config.json", {**SIZES, "architectures": [architecture], **(hf_config or {})})
        env = Env(
            cache_dir=self.home,
            log_level="INFO",
            api_key=None,
            check_invariants=False,
            runtime_dir=self.home,
            is_offline=True,
        )
        return read_model_facts(ModelConfig(model=str(self.home), **settings), env).pooling

    def pools(self, architecture: str, hf_config: dict[str, Any] | None = None, **settings: Any) -> PoolingFacts:
        facts = self.facts(architecture, hf_config, **settings)
        assert facts is not None
        return facts

    def sentence(self, *modules: dict[str, Any], **pooling: Any) -> None:
        self.write("modules.json", [TRANSFORMER, POOLING, *modules])
        self.write("1_Pooling/config.json", {"word_embedding_dimension": 48, **pooling})


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM"])
def test_a_language_model_generates_unless_it_is_converted(model: Model, architecture: str) -> None:
    assert model.facts(architecture) is None
    assert model.facts(architecture, runner="generate", convert="none") is None
    embed = PoolingFacts(convert="embed", pooling="last")
    assert model.facts(architecture, runner="pooling") == embed
    assert model.facts(architecture, convert="embed") == embed
    classify = PoolingFacts(convert="classify", pooling="last", num_labels=2, activation="softmax")
    assert model.facts(architecture, convert="classify") == classify


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("BertModel", PoolingFacts(convert="embed", pooling="cls", is_causal=False)),
        ("XLMRobertaModel", PoolingFacts(convert="embed", pooling="cls", is_causal=False)),
        ("NewModel", PoolingFacts(convert="embed", pooling="cls", is_causal=False)),
        ("BertForMaskedLM", PoolingFacts(convert="embed", pooling="cls", is_causal=False)),
        ("Qwen3Model", PoolingFacts(convert="embed", pooling="last")),
        ("LlamaBidirectionalModel", PoolingFacts(convert="embed", pooling="last", is_causal=False)),
        (
            "ModernBertForSequenceClassification",
            PoolingFacts(convert="classify", pooling="cls", is_causal=False, num_labels=2, activation="softmax"),
        ),
        (
            "Qwen2ForSequenceClassification",
            PoolingFacts(convert="classify", pooling="last", num_labels=2, activation="softmax"),
        ),
        (
            "BertForTokenClassification",
            PoolingFacts(convert="classify", pooling="all", is_causal=False, num_labels=2, activation="softmax"),
        ),
        ("Qwen2ForRewardModel", PoolingFacts(convert="classify", pooling="all", num_labels=1)),
        ("InternLM2ForRewardModel", PoolingFacts(convert="classify", pooling="all", num_labels=1)),
        (
            "Qwen2ForProcessRewardModel",
            PoolingFacts(
                convert="classify",
                pooling="step",
                token_pooling="step",
                num_labels=2,
                activation="softmax",
                step_tag_id=151651,
            ),
        ),
    ],
)
def test_what_a_class_computes(model: Model, architecture: str, expected: PoolingFacts) -> None:
    assert model.facts(architecture) == expected


def test_tasks() -> None:
    assert PoolingFacts(convert="embed", pooling="last").tasks == ("embed", "token_embed")
    assert PoolingFacts(convert="embed", pooling="last", task="token_embed").tasks == ("token_embed", "embed")
    assert PoolingFacts(convert="classify", pooling="all").tasks == ("token_classify",)


def test_modules_of_sentence_transformers(model: Model) -> None:
    model.sentence(pooling_mode_cls_token=False, pooling_mode_mean_tokens=True)
    facts = model.pools("Qwen3ForCausalLM")
    assert (facts.convert, facts.pooling, facts.normalize) == ("embed", "mean", False)
    model.sentence(DENSE, NORMALIZE, pooling_mode="lasttoken")
    model.write(
        "2_Dense/config.json",
        {"in_features": 48, "out_features": 16, "bias": False, "activation_function": "torch.nn.modules.linear.Tanh"},
    )
    model.write("sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    model.write(
        "config_sentence_transformers.json",
        {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"},
    )
    facts = model.pools("BertModel", {"type_vocab_size": 2, "matryoshka_dimensions": [8, 16]})
    assert facts == PoolingFacts(
        convert="embed",
        pooling="last",
        is_causal=False,
        num_segments=2,
        dense=(DenseLayer(path="2_Dense", num_inputs=48, num_outputs=16, has_bias=False, activation="tanh"),),
        dimensions=(8, 16),
        max_seq_length=64,
        lowers_case=True,
        prompts={"query": "Query: ", "document": ""},
        default_prompt="query",
    )


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ([], {"pooling_mode_max_tokens": True}, "pooling max, which octavo does not have"),
        ([], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pooling cls and mean"),
        ([], {}, "pooling of nothing"),
        ([NORMALIZE, DENSE], {"pooling_mode": "cls"}, "modules Transformer, Pooling, Normalize, Dense"),
        ([{**DENSE, "type": "my.own.Module"}], {"pooling_mode": "cls"}, "modules Transformer, Pooling, Module"),
        ([DENSE], {"pooling_mode": "cls"}, "in_features and out_features must be integers"),
    ],
)
def test_modules_that_are_not_supported(model: Model, modules: Any, pooling: Any, message: str) -> None:
    model.sentence(*modules, **pooling)
    with pytest.raises(ConfigError, match=message):
        model.facts("BertModel")


@pytest.mark.parametrize(
    ("hf_config", "expected"),
    [
        ({"num_labels": 1}, (1, "sigmoid")),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, (3, "softmax")),
        ({"num_labels": 1, "problem_type": "regression"}, (1, "identity")),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, (4, "sigmoid")),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            (1, "identity"),
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            (1, "sigmoid"),
        ),
    ],
)
def test_labels_and_activations(model: Model, hf_config: dict[str, Any], expected: tuple[int, str]) -> None:
    facts = model.pools("BertForSequenceClassification", hf_config)
    assert (facts.num_labels, facts.activation) == expected


def test_qwen3_reranker(model: Model) -> None:
    byte_level()._fast.save(str(model.home / "tokenizer.json"))
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["t", "e"],
        "is_original_qwen3_reranker": True,
    }
    facts = model.pools("Qwen3ForCausalLM", hf_overrides=overrides)
    ids = tuple(byte_level().token_id(token) for token in "te")
    assert (facts.score_token_ids, facts.num_labels, facts.activation) == (ids, 1, "sigmoid")
    for tokens, message in ((["yes"], "is not supported"), (["\u2603", "t"], "not all of them are tokens")):
        with pytest.raises(ConfigError, match=message):
            model.facts("Qwen3ForCausalLM", hf_overrides={**overrides, "classifier_from_token": tokens})
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        model.facts("Qwen3ForCausalLM", hf_overrides=overrides, skip_tokenizer_init=True)


def test_is_causal_is_read_from_the_configuration(model: Model) -> None:
    assert not model.pools("Qwen2ForCausalLM", {"is_causal": False}, runner="pooling").is_causal
    assert not model.pools("Gemma3TextModel", {"use_bidirectional_attention": True}).is_causal


@pytest.mark.parametrize("is_text", [False, True])
def test_the_pooler_config_comes_before_the_files(model: Model, is_text: bool) -> None:
    model.sentence(NORMALIZE, pooling_mode="cls")
    given = {"pooling_type": "MEAN", "use_activation": False, "dimensions": 8, "task": "token_embed"}
    facts = model.pools("BertModel", {"is_matryoshka": True}, pooler_config=json.dumps(given) if is_text else given)
    assert (facts.pooling, facts.normalize, facts.dimensions, facts.default_dimensions) == ("mean", False, (), 8)
    assert facts.tasks == ("token_embed", "embed")
    facts = model.pools(
        "BertModel", pooler_config={"seq_pooling_type": "LAST", "tok_pooling_type": "STEP", "step_tag_id": 3}
    )
    assert (facts.pooling, facts.token_pooling, facts.step_tag_id) == ("last", "step", 3)
    older = model.pools("BertForSequenceClassification", pooler_config={"softmax": False})
    assert older.activation == "identity"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pooling": "MEAN"}, "unknown field `pooling`"),
        ("[1]", "Expected `object`"),
        ("{", "pooler_config"),
        ({"pooling_type": "MAX"}, "pooling_type 'MAX' is not one of CLS, LAST, MEAN, ALL, STEP"),
        ({"seq_pooling_type": "ALL"}, "seq_pooling_type 'ALL' is not one of CLS, LAST, MEAN"),
        ({"pooling_type": "CLS", "tok_pooling_type": "ALL"}, "both given"),
        ({"enable_chunked_processing": True}, "enable_chunked_processing is not supported"),
        ({"logit_mean": 1.0}, "logit_mean is not supported"),
        ({"task": "score"}, "task"),
        ({"dimensions": 8}, "is_matryoshka"),
        ({"step_tag_id": 3}, "need pooling_type STEP"),
    ],
)
def test_a_pooler_config_that_is_refused(model: Model, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        model.facts("BertModel", pooler_config=given)
    assert "pooler_config" in str(raised.value)


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("BertModel", {"runner": "generate"}, "BertModel does not generate text"),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "none"}, "convert none, but LlamaForCausalLM generates"),
        ("LlamaForCausalLM", {"runner": "generate", "convert": "embed"}, "makes a pooling model"),
        (
            "LlamaForCausalLM",
            {"hf_overrides": {"is_causal": False}},
            "cannot generate text: its tokens attend to later",
        ),
        ("LlamaForCausalLM", {"pooler_config": {"pooling_type": "CLS"}}, "pooler_config has no effect"),
    ],
)
def test_settings_that_contradict_the_model(model: Model, architecture: str, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model.facts(architecture, **settings)


def test_limits_of_lengths(model: Model) -> None:
    """Sentence Transformers sets a default; the positions of RoBERTa begin after its padding."""
    model.write("sentence_bert_config.json", {"max_seq_length": 64})
    config = {**SIZES, "architectures": ["RobertaModel"], "model_type": "roberta", "max_position_embeddings": 130}
    model.write("config.json", {**config, "pad_token_id": 1})
    for requested, length in ((None, 64), (128, 128)):
        settings = engine_config({"model": str(model.home), "max_model_len": requested})
        env = Env(
            cache_dir=model.home,
            log_level="INFO",
            api_key=None,
            check_invariants=False,
            runtime_dir=model.home,
            is_offline=True,
        )
        facts = read_model_facts(settings.model, env)
        assert resolve(settings, facts, device="cpu", num_cores=1).max_model_len == length
