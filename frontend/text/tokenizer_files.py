"""Loads a model's tokenizer: from `tokenizer.json`, from its source files, or from Mistral's `tekken.json`.

Also reads special tokens and chat templates. Does not tokenize.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as FastTokenizer

from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.config.model import TokenizerMode
from octavo.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FAST_FILE = "tokenizer.json"
_TEKKEN_FILE = "tekken.json"
_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

TokenizerParts: TypeAlias = tuple[FastTokenizer, dict[str, str], dict[str, str]]
"""The tokenizer, the texts of its named special tokens, and its chat templates by name."""


def read_tokenizer(path: Path, mode: TokenizerMode) -> TokenizerParts:
    """Read a directory's tokenizer.

    Args:
        path: the directory.
        mode: auto, hf, fast: `tokenizer.json`, or the slow mode if that file is missing; auto tries mistral before
        slow. slow: source files of a tokenizer.json, converted by `transformers`, whose import takes seconds. mistral:
        `tekken.json`, also read by `transformers`.

    Raises:
        ConfigError: the file does not exist, or cannot be read.
    """
    special_tokens, chat_templates = _read_settings(path)
    if mode == "mistral" or (mode == "auto" and _has(path, _TEKKEN_FILE) and not _has(path, _FAST_FILE)):
        fast, tekken_tokens, tekken_templates = _read_tekken(path)
        special_tokens, chat_templates = tekken_tokens | special_tokens, tekken_templates | chat_templates
    elif mode == "slow" or not _has(path, _FAST_FILE):
        fast = _convert_slow(path, mode)
    else:
        fast = _read_fast(path / _FAST_FILE)
    _make_special(fast, special_tokens.values())
    return fast, special_tokens, chat_templates


def _has(path: Path, name: str) -> bool:
    return (path / name).is_file()


def _read_fast(file: Path) -> FastTokenizer:
    try:
        return FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise _unreadable(file, error) from error


def _read_tekken(path: Path) -> TokenizerParts:
    """Read Mistral's own format. Texts begin with BOS, as in `mistral-common`, which also has the chat templates."""
    file = path / _TEKKEN_FILE
    if not file.is_file():
        raise ConfigError(f"no {_TEKKEN_FILE} in {path}", hint="leave out --tokenizer-mode mistral")
    try:
        from transformers.integrations.mistral import convert_tekken_tokenizer

        read = convert_tekken_tokenizer(str(file))
    except (OSError, ValueError, ImportError, LookupError, TypeError) as error:
        raise _unreadable(file, error) from error
    fast = _backend(read, path)
    bos = str(read.bos_token)
    fast.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, fast.token_to_id(bos))]
    )
    special_tokens = {name: str(text) for name in _SPECIAL_NAMES if (text := getattr(read, name, None))}
    return fast, special_tokens, {"default": read.chat_template} if isinstance(read.chat_template, str) else {}


def _convert_slow(path: Path, mode: TokenizerMode) -> FastTokenizer:
    """Convert the source files of a tokenizer.json. An existing tokenizer.json is ignored."""
    if not any(_has(path, name) for name in _SLOW_FILES):
        if unread := [name for name in (_FAST_FILE, _TEKKEN_FILE) if _has(path, name)]:
            raise ConfigError(
                f"the tokenizer in {path} has only {' and '.join(unread)}, which mode {mode} does not read",
                hint=f"leave out --tokenizer-mode {mode}",
            )
        raise ConfigError(
            f"no tokenizer in {path}: neither {_FAST_FILE} nor {', '.join((*_SLOW_FILES, _TEKKEN_FILE))}",
            hint="name the directory that holds it with --tokenizer",
        )
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="octavo-tokenizer-") as others:
        for file in path.iterdir():
            if file.name != _FAST_FILE:
                Path(others, file.name).symlink_to(file.resolve())
        try:
            # False instead of None: with None, transformers asks on the terminal, and runs code of the repository after
            # a "y".
            slow = AutoTokenizer.from_pretrained(others, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError, KeyError) as error:
            if "auto_map" in read_json(path / "tokenizer_config.json"):
                raise ConfigError(
                    f"the tokenizer in {path} is implemented by code in its repository, which octavo never runs",
                    hint=f"name a directory that holds a {_FAST_FILE} with --tokenizer",
                ) from error
            raise _unreadable(path, error) from error
    return _backend(slow, path)


def _backend(tokenizer: "PreTrainedTokenizerBase", path: Path) -> FastTokenizer:
    """Return the `tokenizers` backend of a `transformers` tokenizer."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(fast, FastTokenizer):
        raise ConfigError(
            f"the tokenizer in {path} ({type(tokenizer).__name__}) cannot be converted to the tokenizers library",
            hint=f"name a directory that holds a {_FAST_FILE} with --tokenizer",
        )
    return fast


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"cannot read the tokenizer {path}: {reason}")


def _make_special(fast: FastTokenizer, texts: Iterable[str]) -> None:
    """Mark tokens as special that tokenizer_config.json names but that are ordinary in tokenizer.json."""
    added = {token.content for token in fast.get_added_tokens_decoder().values()}
    ordinary = [text for text in texts if text not in added and fast.token_to_id(text) is not None]
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(ordinary)])


def _read_settings(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the named special tokens and the chat templates from the files next to the tokenizer."""
    settings = read_json(path / "special_tokens_map.json") | read_json(path / "tokenizer_config.json")
    special_tokens = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special_tokens[name] = text
    return special_tokens, _chat_templates(path, settings)


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return templates by name. Separate files take precedence over entries of tokenizer_config.json."""
    templates: dict[str, str] = {}
    in_config = settings.get("chat_template")
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        templates |= {entry["name"]: entry["template"] for entry in in_config if {"name", "template"} <= entry.keys()}
    in_json = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
