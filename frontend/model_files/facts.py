"""`read_model_facts`: everything that the other processes need to know about a model, from its files alone.

Reads only JSON, because importing `transformers` would slow down every start. The worker checks that the architecture
is supported.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo.frontend.model_files import mistral
from octavo.frontend.model_files.draft import check_draft_vocabulary
from octavo.frontend.model_files.gguf.cache import convert_gguf
from octavo.frontend.model_files.json_file import read_json
from octavo.frontend.model_files.locate import locate_model, locate_tokenizer
from octavo.frontend.model_files.media import split_config
from octavo.frontend.model_files.pooling import read_pooling_facts
from octavo.protocol.config import EngineConfig, ModelConfig, ModelFacts
from octavo.protocol.config.speculation import head_path, is_draft_model
from octavo.protocol.env import Env, set_default
from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import LAYOUTS, has_weights

PARAMS = "params.json"
"""Configuration file of Mistral's own format."""

_DTYPES = ("bfloat16", "float16", "float32")
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files of AutoGPTQ, AutoAWQ and ModelOpt, whose older checkpoints do not name their method in config.json."""
UNLIMITED_POSITIONS = 131072
"""Limit for models without one. Each slot of a batch has a list of this many token ids, in virtual memory."""
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert"}
_SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of sampling parameters in generation_config.json, mapped to names in `SamplingParams`."""


def read_model_facts(config: ModelConfig, env: Env) -> ModelFacts:
    """Locate the model and read its files.

    Blocks until: a download or the conversion of a new GGUF file's metadata (seconds) has finished.

    Raises:
        ConfigError: the model does not exist, or a file is missing, malformed or unsupported.
    """
    path = locate_model(config, env)
    if config.hf_token:  # for adapters that the processes of a server download later
        set_default("HF_TOKEN", config.hf_token)
    load_format = _load_format(config, path)
    home = convert_gguf(path, env) if path.is_file() else path
    hf_config = {**_read_config(config, home), **_overrides("hf_overrides", config.hf_overrides)}
    hf_config |= _quantization_config(hf_config, home)
    generation = _read_generation_config(config, home)
    overrides = _overrides("override_generation_config", config.override_generation_config)
    generation |= overrides
    hf_config, architecture, media = split_config(hf_config, _architecture(hf_config, home), home, config)
    tokenizer_path = None if config.skip_tokenizer_init else str(_tokenizer_home(config, env) or home)
    num_heads = _positive(hf_config, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    return ModelFacts(
        model_path=str(path),
        tokenizer_path=tokenizer_path,
        tokenizer_mode=config.tokenizer_mode,
        load_format=load_format,
        architecture=architecture,
        hf_config=hf_config,
        vocab_size=_positive(hf_config, "vocab_size"),
        num_layers=_positive(
            hf_config,
            *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
            default=len(hf_config.get("layers_block_type") or ()),  # key of Nemotron-H, as written by transformers 5
        ),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(hf_config, num_heads),
        head_dim=_positive(
            hf_config, "head_dim", default=_positive(hf_config, "hidden_size", "n_embd", "d_model", "dim") // num_heads
        ),
        max_position_embeddings=_max_positions(hf_config),
        checkpoint_dtype=_checkpoint_dtype(hf_config),
        eos_token_ids=_eos_token_ids({**read_json(home / "generation_config.json"), **overrides}, hf_config),
        generation_defaults={
            ours: generation[theirs]
            for theirs, ours in _SAMPLING_DEFAULTS.items()
            if generation.get(theirs) is not None
        },
        model_impl="octavo" if config.model_impl == "vllm" else config.model_impl,
        trust_remote_code=config.trust_remote_code,
        pooling=read_pooling_facts(
            config, home, architecture, hf_config, tokenizer_path=tokenizer_path, is_gguf=path.is_file()
        ),
        media=media,
    )


def read_head_facts(config: EngineConfig, facts: ModelFacts, env: Env) -> ModelFacts | None:
    """Read the files of the draft model or head that the workers draft with. `None` if they do not use one.

    Raises:
        ConfigError: a setting or a file is invalid, or a draft model has other tokens than the model.
    """
    path = head_path(config.speculation)
    if path is None:
        return None
    is_whole = is_draft_model(config.speculation)
    own = ModelConfig(
        model=path,
        skip_tokenizer_init=True,
        generation_config="vllm",
        download_dir=config.model.download_dir,
        hf_token=config.model.hf_token,
        load_format="dummy" if is_whole and config.model.load_format == "dummy" else "auto",
    )
    head = read_model_facts(own, env)
    if is_whole:
        check_draft_vocabulary(facts, head)
    return head


def _load_format(config: ModelConfig, path: Path) -> str:
    """Resolve "auto", and check that the files exist."""
    wanted = "auto" if config.load_format == "hf" else config.load_format
    if path.is_file():
        if wanted in LAYOUTS:
            raise ConfigError(f"--load-format {wanted}, but {path.name} is a single file", hint="use gguf or auto")
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is neither a directory nor a .gguf file", hint="name the model's directory")
        return "dummy" if wanted == "dummy" else "gguf"
    if wanted == "dummy":
        return wanted
    if wanted == "gguf":
        raise ConfigError(f"--load-format gguf, but {path} is a directory in Hugging Face layout", hint="name the file")
    candidates = list(LAYOUTS) if wanted == "auto" else [wanted]
    if _config_format(config, path) == "mistral":
        candidates.sort(key="mistral".__ne__)
    for candidate in candidates:
        if has_weights(path, candidate):
            return candidate
    kinds = "neither *.safetensors nor *.bin or *.pt" if wanted == "auto" else f"none for --load-format {wanted}"
    raise ConfigError(
        f"no weights in {path}: {kinds}",
        hint="check the directory; --load-format dummy runs a model with random weights",
    )


def _config_format(config: ModelConfig, home: Path) -> str:
    """Resolve "auto": params.json is read if there is no config.json."""
    if config.config_format != "auto":
        return config.config_format
    has_params_only = (home / PARAMS).is_file() and not (home / "config.json").is_file()
    return "mistral" if has_params_only else "hf"


def _tokenizer_home(config: ModelConfig, env: Env) -> Path | None:
    """Return the directory for `--tokenizer`, which may also name a GGUF file that contains a tokenizer."""
    path = locate_tokenizer(config, env)
    return convert_gguf(path, env) if path and path.is_file() else path


def _read_config(config: ModelConfig, home: Path) -> dict[str, Any]:
    if _config_format(config, home) == "mistral":
        if not (home / PARAMS).is_file():
            raise ConfigError(f"no {PARAMS} in {home}", hint="leave out --config-format mistral to read config.json")
        return mistral.hf_config(read_json(home / PARAMS))
    if not (home / "config.json").is_file():
        raise ConfigError(f"no config.json in {home}", hint="name a directory in Hugging Face layout or a .gguf file")
    return read_json(home / "config.json")


def _overrides(name: str, overrides: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the value of a setting that is JSON text or an object.

    Raises:
        ConfigError: the value is not a JSON object.
    """
    if not isinstance(overrides, str):
        return dict(overrides or {})
    try:
        return msgspec.json.decode(overrides, type=dict[str, Any])
    except msgspec.DecodeError as error:
        flag = name.replace("_", "-")
        raise ConfigError(
            f"{name} is not a JSON object: {error}", hint=f"""write --{flag} '{{"name": value}}'"""
        ) from None


def _read_generation_config(config: ModelConfig, home: Path) -> dict[str, Any]:
    """Return the generation_config.json that contains the default sampling parameters."""
    match config.generation_config:
        case "vllm":
            return {}
        case "auto":
            return read_json(home / "generation_config.json")
    directory = Path(config.generation_config).expanduser()
    if not (directory / "generation_config.json").is_file():
        raise ConfigError(
            f"no generation_config.json in {directory}",
            hint="--generation-config is auto, vllm or a directory that holds one",
        )
    return read_json(directory / "generation_config.json")


def _architecture(hf_config: dict[str, Any], home: Path) -> str:
    names = hf_config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json in {home} names no architectures",
            hint='add for example "architectures": ["LlamaForCausalLM"]',
        )
    return names[0]


def _positive(hf_config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """Return the value of the first key that is set, an integer of at least 1."""
    found = next((hf_config[name] for name in names if hf_config.get(name) is not None), default)
    if type(found) is not int or found < 1:
        raise ConfigError(f"config.json: {names[0]} must be a positive integer, not {found!r}")
    return found


def _num_kv_heads(hf_config: dict[str, Any], num_heads: int) -> int:
    """Return the number of heads of keys and values; Falcon has keys of its own for it."""
    if hf_config.get("model_type") == "falcon":
        if hf_config.get("new_decoder_architecture"):
            return _positive(hf_config, "num_kv_heads", default=num_heads)
        return 1 if hf_config.get("multi_query", True) else num_heads
    return _positive(hf_config, "num_key_value_heads", default=num_heads)


def _max_positions(hf_config: dict[str, Any]) -> int:
    """Return the number of positions. With YaRN, the limit in the file may not include the scaling."""
    # The weights of these models do not limit positions. BLOOM and Falcon were trained with this many.
    default = {"bloom": 2048, "falcon": 2048, "mamba2": UNLIMITED_POSITIONS}.get(hf_config.get("model_type", ""))
    names = "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"
    limit = _positive(hf_config, *names, default=default)
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "yarn":
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if isinstance(original, int) and isinstance(factor, int | float):
            return max(limit, int(original * factor))
    if hf_config.get("model_type") in _OFFSET_POSITIONS:  # the first position follows that of padding
        return limit - 1 - int(hf_config.get("pad_token_id") or 1)
    return limit


def _quantization_config(hf_config: dict[str, Any], home: Path) -> dict[str, Any]:
    """Return the quantization of the weights in the form of config.json's key; older checkpoints have it elsewhere."""
    if section := hf_config.get("quantization_config"):
        if isinstance(section, dict) and "quant_method" not in section and section.get("quant_library") == "modelopt":
            return {"quantization_config": {"quant_method": "modelopt", **section}}
        return {}
    if hf_config.get("compression_config"):
        return {"quantization_config": hf_config["compression_config"], "compression_config": None}
    for name, method in _QUANTIZATION_FILES.items():
        if (home / name).is_file():
            section = read_json(home / name)
            section = section.get("quantization", section)
            if not isinstance(section, dict):
                raise ConfigError(
                    f"{home / name}: 'quantization' is {section!r}; expected an object",
                    hint="remove the file if the weights are not quantized",
                )
            return {"quantization_config": {"quant_method": method, **section}}
    return {}


def _checkpoint_dtype(hf_config: dict[str, Any]) -> str:
    """Return the dtype of the saved weights; float32, PyTorch's default, if the file does not name one."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    short = re.sub(r"^torch\.", "", str(name))
    if short not in _DTYPES:
        raise ConfigError(
            f"config.json: weights of type {short} are not supported", hint=f"one of {', '.join(_DTYPES)}"
        )
    return short


def _eos_token_ids(generation: dict[str, Any], hf_config: dict[str, Any]) -> list[int]:
    """Return the tokens that end a generation: an integer or a list, in either file."""
    found = generation.get("eos_token_id")
    if found is None:
        found = hf_config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ConfigError(f"eos_token_id must be a token id or a list of them, not {found!r}")
    return ids
