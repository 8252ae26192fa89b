"""`read_pooling_facts`: determines whether a model pools or generates, and how it pools, from its files and settings.

The files are those of Sentence Transformers: `modules.json` and the folders that it names. The rules of `--runner`,
`--convert` and `--pooler-config` are vLLM's.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from octavo.frontend.model_files.json_file import read_json
from octavo.frontend.model_files.pooler_config import PoolerConfig, invalid_pooler_config, read_pooler_config
from octavo.frontend.model_files.pooling_head import activation_of, named_activation, num_labels_of, score_token_ids_of
from octavo.protocol.config import ModelConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.pooling import Activation, Conversion, DenseLayer, PoolingFacts, PoolingType

_ENCODER = re.compile(
    "(Bert|Roberta|XLMRoberta|XLMRobertaXL|Camembert|DistilBert|Electra|MPNet|ModernBert|NomicBert|New|Gte|GteNew|"
    "EuroBert|JinaBert|Siglip)(Model|ForMaskedLM|ForPreTraining|EmbeddingModel|For(Sequence|Token)Classification)"
)
"""Architectures whose tokens attend to later tokens."""
_CLASSIFIER = re.compile(r"For\w*Classification|ClassificationModel|RewardModel")
_LANGUAGE_MODEL = re.compile(r"LMHeadModel|ForCausalLM|ForConditionalGeneration")
_RETRIEVER = "ForRetrieval"
"""Suffix of architectures that compute a vector for each token."""
_POOLING_MODES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_SENTENCE_CONFIGS = (
    *("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"),
    *("sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json"),
    "sentence_xlnet_config.json",
)
PRM_STEP_TAG_ID = 151651
"""Token <extra_0> of Qwen2.5-Math-PRM, whose files do not name it."""


class _Modules:
    """The modules of Sentence Transformers that follow the model."""

    def __init__(self, home: Path) -> None:
        """Read `modules.json`.

        Raises:
            ConfigError: a module is unknown, or the order of the modules is not supported.
        """
        self.pooling: Path | None = None
        """Folder of the pooling module. `None` if there is none."""
        self.dense: tuple[DenseLayer, ...] = ()
        self.has_normalize = False
        modules = _read_list(home / "modules.json")
        kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
        if "Pooling" not in kinds:
            return
        self.pooling = home / str(modules[kinds.index("Pooling")].get("path", ""))
        order = [kind for kind in kinds if kind not in ("Transformer", "Dropout")]
        if order != ["Pooling", *["Dense"] * kinds.count("Dense"), *["Normalize"] * kinds.count("Normalize")]:
            raise ConfigError(
                f"modules.json: the modules {', '.join(kinds)} are not supported",
                hint="octavo computes Transformer, Pooling, any number of Dense, and Normalize, in this order",
            )
        self.has_normalize = "Normalize" in kinds
        self.dense = tuple(
            _dense_layer(home, str(module["path"]))
            for module, kind in zip(modules, kinds, strict=True)
            if kind == "Dense"
        )


def read_pooling_facts(
    config: ModelConfig,
    home: Path,
    architecture: str,
    hf_config: Mapping[str, Any],
    *,
    tokenizer_path: str | None,
    is_gguf: bool,
) -> PoolingFacts | None:
    """Return how a model computes vectors or scores. `None` if it generates tokens.

    Args:
        config: with the runner, the conversion and the pooler's settings.
        home: folder of the model's files.
        architecture: class that `config.json` names.
        hf_config: `config.json`.
        tokenizer_path: folder of the tokenizer. `None` if there is none.
        is_gguf: whether the weights are in a GGUF file.

    Raises:
        ConfigError: a file or setting is malformed or unsupported, or the settings contradict the model.
    """
    pooler = read_pooler_config(config.pooler_config)
    modules = _Modules(home)
    if not _is_pooling(config, architecture, hf_config, modules):
        if pooler != PoolerConfig():
            raise ConfigError(
                f"pooler_config has no effect: {architecture} generates text here",
                hint="add --runner pooling, or leave out --pooler-config",
            )
        if hf_config.get("is_causal") is False or hf_config.get("use_bidirectional_attention"):
            raise ConfigError(
                f"{architecture} cannot generate text: its tokens attend to later ones (is_causal or "
                "use_bidirectional_attention in config.json)",
                hint="use --runner pooling",
            )
        return None
    if is_gguf:
        raise ConfigError(
            "--runner pooling is not supported for GGUF files",
            hint="name the directory of the model in Hugging Face layout",
        )
    facts = _model_facts(config, home, architecture, hf_config, pooler, modules)
    if facts.convert == "classify":
        facts = _with_head(facts, config, architecture, hf_config, tokenizer_path)
    return _overridden(facts, pooler)


def _model_facts(
    config: ModelConfig,
    home: Path,
    architecture: str,
    hf_config: Mapping[str, Any],
    pooler: PoolerConfig,
    modules: _Modules,
) -> PoolingFacts:
    """Return the facts in the files, without the classification head."""
    convert = _conversion(config, architecture, hf_config, modules)
    is_causal = _is_causal(architecture, hf_config)
    pooling, token_pooling = _pooling_types(pooler, architecture, modules)
    sentence = _sentence_config(home)
    prompts, default_prompt = _prompts(home, modules)
    return PoolingFacts(
        convert=convert,
        pooling=pooling,
        token_pooling=token_pooling,
        is_causal=is_causal,
        normalize=modules.has_normalize if modules.pooling is not None else True,
        num_segments=1 if is_causal else min(2, max(1, int(hf_config.get("type_vocab_size") or 1))),
        dense=modules.dense if convert == "embed" else (),
        dimensions=_dimensions(hf_config),
        step_tag_id=PRM_STEP_TAG_ID if architecture.endswith("ForProcessRewardModel") else None,
        max_seq_length=int(sentence.get("max_seq_length") or 0),
        pads_texts=architecture == "SiglipModel",
        appends_eos=bool(read_json(home / "tokenizer_config.json").get("add_eos_token")),
        lowers_case=bool(sentence.get("do_lower_case")),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _with_head(
    facts: PoolingFacts,
    config: ModelConfig,
    architecture: str,
    hf_config: Mapping[str, Any],
    tokenizer_path: str | None,
) -> PoolingFacts:
    score_token_ids = score_token_ids_of(config, tokenizer_path, hf_config)
    num_labels = 1 if score_token_ids else num_labels_of(architecture, hf_config)
    return replace(
        facts,
        score_token_ids=score_token_ids,
        num_labels=num_labels,
        activation=activation_of(architecture, hf_config, num_labels),
    )


def _overridden(facts: PoolingFacts, pooler: PoolerConfig) -> PoolingFacts:
    """Return the facts with the user's settings applied, except the pooling types, which are already applied."""
    if pooler.dimensions and facts.dimensions is None:
        raise invalid_pooler_config(
            f"dimensions {pooler.dimensions}, but the model's vectors cannot be cut; if it was trained for that, add "
            "--hf-overrides '{\"is_matryoshka\": true}'"
        )
    if facts.token_pooling != "step" and (pooler.step_tag_id is not None or pooler.returned_token_ids):
        raise invalid_pooler_config("step_tag_id and returned_token_ids need pooling_type STEP")
    if pooler.activates is not None:
        activation: Activation = facts.activation if pooler.activates else "identity"
        facts = replace(facts, normalize=pooler.activates, activation=activation)
    return replace(
        facts,
        task=pooler.task,
        default_dimensions=pooler.dimensions or 0,
        step_tag_id=facts.step_tag_id if pooler.step_tag_id is None else pooler.step_tag_id,
        returned_token_ids=tuple(pooler.returned_token_ids or ()),
    )


def _is_pooling(config: ModelConfig, architecture: str, hf_config: Mapping[str, Any], modules: _Modules) -> bool:
    """Resolve `--runner auto`."""
    is_pooling_class = _is_pooling_class(architecture, hf_config)
    if config.runner == "generate" and is_pooling_class:
        raise ConfigError(f"--runner generate, but {architecture} does not generate text", hint="use --runner auto")
    if config.runner != "auto":
        if config.runner == "generate" and config.convert not in ("auto", "none"):
            raise ConfigError(
                f"--convert {config.convert} makes a pooling model, but --runner is generate",
                hint="use --runner pooling",
            )
        return config.runner == "pooling"
    return config.convert in ("embed", "classify") or modules.pooling is not None or is_pooling_class


def _is_pooling_class(architecture: str, hf_config: Mapping[str, Any]) -> bool:
    if _LANGUAGE_MODEL.search(architecture):
        return False
    if architecture.endswith(_RETRIEVER):
        return True
    # Code of a repository may give generative classes any name.
    generates = "AutoModelForCausalLM" in (hf_config.get("auto_map") or {})
    is_bare = architecture.endswith(("Model", "ForTextEncoding")) and not generates
    return is_bare or bool(_ENCODER.fullmatch(architecture) or _CLASSIFIER.search(architecture))


def _conversion(config: ModelConfig, architecture: str, hf_config: Mapping[str, Any], modules: _Modules) -> Conversion:
    """Resolve `--convert auto` and `none`."""
    if config.convert == "embed" or config.convert == "classify":
        return config.convert
    if _CLASSIFIER.search(architecture):
        return "classify"
    if config.convert == "none" and not _is_pooling_class(architecture, hf_config) and modules.pooling is None:
        raise ConfigError(
            f"--convert none, but {architecture} generates text",
            hint="use --convert embed or classify, or --runner generate",
        )
    return "embed"


def _is_causal(architecture: str, hf_config: Mapping[str, Any]) -> bool:
    if _ENCODER.fullmatch(architecture) or "Bidirectional" in architecture:
        return False
    return hf_config.get("is_causal") is not False and not hf_config.get("use_bidirectional_attention")


def _pooling_types(pooler: PoolerConfig, architecture: str, modules: _Modules) -> tuple[PoolingType, PoolingType]:
    """Return the pooling of prompts and of tokens. They are equal for a model with results per token only."""
    token_pooling = pooler.token_pooling or ("step" if architecture.endswith("ForProcessRewardModel") else "all")
    if pooler.sequence_pooling:
        return pooler.sequence_pooling, token_pooling
    if architecture.endswith(_RETRIEVER):
        return token_pooling, token_pooling
    if "TokenClassification" in architecture or architecture.endswith("RewardModel") or pooler.token_pooling:
        return token_pooling, token_pooling
    if modules.pooling is not None and not _CLASSIFIER.search(architecture):
        return _file_pooling(modules.pooling / "config.json"), token_pooling
    is_cls = _ENCODER.fullmatch(architecture) and architecture != "SiglipModel"
    return "cls" if is_cls else "last", token_pooling


def _file_pooling(file: Path) -> PoolingType:
    """Return the mode of a pooling module; newer files name it, older files have a switch per mode.

    Raises:
        ConfigError: the file does not have exactly one mode that octavo supports.
    """
    values = read_json(file)
    named = values.get("pooling_mode")
    modes = (
        [named]
        if isinstance(named, str)
        else [
            key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for key, value in values.items()
            if key.startswith("pooling_mode_") and value is True
        ]
    )
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise ConfigError(
            f"{file} asks for the pooling {' and '.join(map(str, modes)) or 'of nothing'}, which octavo does not have",
            hint="""--pooler-config '{"pooling_type": "MEAN"}' chooses one of CLS, LAST and MEAN instead""",
        )
    return _POOLING_MODES[str(modes[0])]


def _dense_layer(home: Path, path: str) -> DenseLayer:
    file = home / path / "config.json"
    values = read_json(file)
    try:
        return DenseLayer(
            path=path,
            num_inputs=int(values["in_features"]),
            num_outputs=int(values["out_features"]),
            has_bias=bool(values.get("bias", True)),
            activation=named_activation(values.get("activation_function", "Identity"), str(file)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: in_features and out_features must be integers ({error})") from None


def _dimensions(hf_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths to which vectors may be truncated, from vLLM's two keys of config.json (or --hf-overrides)."""
    if listed := hf_config.get("matryoshka_dimensions"):
        return tuple(int(length) for length in listed)
    return () if hf_config.get("is_matryoshka") else None


def _sentence_config(home: Path) -> dict[str, Any]:
    """Return the tokenizer settings that Sentence Transformers adds."""
    return next((found for name in _SENTENCE_CONFIGS if (found := read_json(home / name))), {})


def _prompts(home: Path, modules: _Modules) -> tuple[dict[str, str], str | None]:
    """Return the prefixes of texts by name, and the name of the default prefix."""
    values = read_json(home / "config_sentence_transformers.json")
    pooling = read_json(modules.pooling / "config.json") if modules.pooling else {}
    if pooling.get("include_prompt") is False:  # the mean would have to exclude the tokens of the prefix
        return {}, None
    prompts = {str(name): str(text) for name, text in (values.get("prompts") or {}).items() if text is not None}
    default = values.get("default_prompt_name")
    return prompts, default if default in prompts else None


def _read_list(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON file. Empty if the file does not exist."""
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{file} does not hold a list of modules")
    return found
