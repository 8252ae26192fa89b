"""Soft prompts: PEFT's prompt tuning, whose trained embeddings precede the tokens of a prompt."""

import asyncio
from pathlib import Path
from typing import Any

from octavo.frontend.generation.embeds import embeds_of, require_embeds
from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.adapters import CONFIG_FILE, Adapter, adapter_digest, adapter_files
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError, InvalidRequestError
from octavo.protocol.ids import pack_ids
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds

PEFT_TYPE = "PROMPT_TUNING"
_TENSOR = "prompt_embeddings"
_PARAM = "lora_path"

_REFUSED = {
    "PREFIX_TUNING": "prefix tuning, which trains keys and values of all layers",
    "P_TUNING": "p-tuning, whose embeddings a network makes",
    "MULTITASK_PROMPT_TUNING": "multitask prompt tuning, whose embeddings depend on the task",
    "CPT": "context-aware prompt tuning",
}
_WITHOUT_EFFECT = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "num_attention_heads",
        "num_layers",
        "peft_type",
        "peft_version",
        "prompt_tuning_init",
        "prompt_tuning_init_text",
        "revision",
        "runtime_config",
        "tokenizer_kwargs",
        "tokenizer_name_or_path",
    ]
)
"""Configuration fields that matter only to training."""
_ONLY: dict[str, tuple[object, ...]] = {"task_type": ("CAUSAL_LM", None), "num_transformer_submodules": (1, None)}
MAX_SOFT_PROMPTS = 1024
"""Maximum number of soft prompts whose rows are kept in memory."""
_MAX_HEAD_BYTES = 2**20
"""Maximum bytes of a weight file in addition to its numbers."""


class SoftPrompts:
    """The rows of soft prompts, which requests select like LoRA adapters.

    Args:
        config: the configuration of the engine.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self._rows: dict[str, PromptEmbeds] = {}
        """Rows by the digest of their files. The oldest entry is dropped, and read again when it is needed."""

    async def prepend(self, prompt: TokenizedPrompt, adapter: Adapter) -> TokenizedPrompt:
        """Return a prompt with an adapter's rows before it. Read the rows in a thread the first time.

        Raises:
            InvalidRequestError: the files were changed or deleted since the adapter was loaded.
        """
        if (rows := self._rows.get(adapter.digest)) is None:
            rows = await asyncio.to_thread(self._read, adapter)
            if len(self._rows) >= MAX_SOFT_PROMPTS:
                del self._rows[next(iter(self._rows))]
            self._rows[adapter.digest] = rows
        return with_soft_prompt(prompt, rows)

    def _read(self, adapter: Adapter) -> PromptEmbeds:
        directory = Path(adapter.path)
        try:
            rows = read_soft_prompt(directory, self._config)
            is_same = adapter_digest(directory) == adapter.digest
        except (OSError, ConfigError) as error:
            raise InvalidRequestError(
                f"the soft prompt {adapter.name!r} cannot be read again: {error}", "model"
            ) from error
        if not is_same:
            raise InvalidRequestError(
                f"the files of the soft prompt {adapter.name!r} have changed since it was loaded: load it again",
                "model",
            )
        return rows


def has_soft_prompt(directory: Path) -> bool:
    """Return whether an adapter is a soft prompt instead of a LoRA adapter.

    Raises:
        InvalidRequestError: it is another kind of prompt adapter of PEFT.
        OSError, ConfigError: its configuration cannot be read.
    """
    kind = read_json(directory / CONFIG_FILE).get("peft_type")
    if kind in _REFUSED:
        raise InvalidRequestError(
            f"{directory}: peft_type {kind} is {_REFUSED[kind]}: only {PEFT_TYPE} and LORA adapters are served", _PARAM
        )
    return bool(kind == PEFT_TYPE)


def read_soft_prompt(directory: Path, config: ResolvedConfig) -> PromptEmbeds:
    """Return the rows of a soft prompt, in the model's dtype.

    Args:
        directory: a directory written by PEFT's `save_pretrained`.
        config: the configuration of the engine.

    Raises:
        InvalidRequestError: a field or tensor is invalid (the error names it), or the engine accepts no prompt
        embeddings.
        OSError, ConfigError: a file is missing or cannot be read.
    """
    require_embeds(config)
    settings = read_json(directory / CONFIG_FILE)
    num_rows = _num_rows(settings, directory)
    _, file = adapter_files(directory)
    if file.suffix != ".safetensors":
        raise InvalidRequestError(f"{file}: save the soft prompt with safe_serialization=True", _PARAM)
    most = config.max_model_len * config.model.embedding_width * 4 + _MAX_HEAD_BYTES
    if (num_bytes := file.stat().st_size) > most:
        raise InvalidRequestError(f"{file} has {num_bytes} bytes, more than a whole prompt of embeddings", _PARAM)
    tensors = _load(file)
    if set(tensors) != {_TENSOR}:
        raise InvalidRequestError(f"{file} holds {sorted(tensors)}, not only {_TENSOR}", _PARAM)
    try:
        embeds = embeds_of(tensors[_TENSOR], config, config.max_model_len)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{file}: {_TENSOR}: {error}", _PARAM) from error
    if embeds.num_rows != num_rows:
        raise InvalidRequestError(f"{file} has {embeds.num_rows} rows, and num_virtual_tokens is {num_rows}", _PARAM)
    return embeds


def with_soft_prompt(prompt: TokenizedPrompt, rows: PromptEmbeds) -> TokenizedPrompt:
    """Return a prompt with rows before it. The prompt may already contain rows."""
    num_rows = rows.num_rows
    token_ids = pack_ids([PLACEHOLDER] * num_rows) + prompt.token_ids
    if (own := prompt.embeds) is None:
        return TokenizedPrompt(prompt.text, token_ids, rows)
    return TokenizedPrompt(prompt.text, token_ids, PromptEmbeds.join([(0, rows), (num_rows, own)]))


def _num_rows(settings: dict[str, Any], directory: Path) -> int:
    """Return the number of rows that a configuration specifies, after checking all its fields."""
    where = directory / CONFIG_FILE
    num_rows = settings.get("num_virtual_tokens")
    if type(num_rows) is not int or num_rows < 1:
        raise InvalidRequestError(f"{where}: num_virtual_tokens must be above 0, got {num_rows!r}", _PARAM)
    for name, value in settings.items():
        if name in ("num_virtual_tokens", "token_dim") or name in _WITHOUT_EFFECT or value in (None, False):
            continue
        if value not in _ONLY.get(name, ()):
            raise InvalidRequestError(f"{where}: {name} {value!r} is not supported for soft prompts", _PARAM)
    return num_rows


def _load(file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"{file} is not a safetensors file, or is damaged: {error}", _PARAM) from error
