"""Resolves the user's name of a model or an adapter to a local directory or .gguf file.

Downloads from the hub if needed. It does not read the files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.adapters import CONFIG_FILE, WEIGHT_FILES
from octavo.protocol.config import ModelConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import LAYOUTS, gguf_parts, has_weights

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "*.model",
    "chat_template.*",
    "additional_chat_templates/*",
]
_SENTENCE_FILES = [
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    "[0-9]_*/pytorch_model.bin",
]
"""Files of Sentence Transformers, which describe how hidden states become vectors."""
_MODEL_FILES = ["config.json", "params.json", "generation_config.json", *_SENTENCE_FILES, *_TOKENIZER_FILES]


_ADAPTER_PARTS = [[CONFIG_FILE], WEIGHT_FILES]
"""An adapter has one file from each of these lists."""
_ADAPTER_FILES = [CONFIG_FILE, *WEIGHT_FILES]


@dataclass(frozen=True)
class _Hub:
    """A hub repository and its download settings."""

    kind: str
    """What it should contain ("model" or "adapter"), for errors."""
    name: str
    revision: str | None
    cache_dir: str | None
    """`None`: the hub library's default."""
    token: str | None
    """`None`: the token of `hf auth login`."""

    def snapshot(self, load_format: str | None, patterns: list[str], *, local_files_only: bool = False) -> str:
        """Return the local directory with the repository's files that match `patterns`, and its weights."""
        from huggingface_hub import snapshot_download

        layout = LAYOUTS[load_format] if load_format else None
        return snapshot_download(
            self.name,
            revision=self.revision,
            cache_dir=self.cache_dir,
            token=self.token,
            allow_patterns=[*patterns, layout.index, *layout.patterns] if layout else patterns,
            ignore_patterns=list(layout.excluded) if layout else None,
            local_files_only=local_files_only,
        )


def locate_model(config: ModelConfig, env: Env) -> Path:
    """Return the model's local directory or .gguf file, downloading it if no local path has that name.

    Blocks until: the download, if any, has finished; it shows its progress.

    Raises:
        ConfigError: the file does not exist or cannot be downloaded; the hint says what to do.
    """
    wanted = "auto" if config.load_format in ("hf", "gguf") else config.load_format
    formats = [None] if wanted == "dummy" else list(LAYOUTS) if wanted == "auto" else [wanted]
    if config.config_format == "mistral":
        formats.sort(key="mistral".__ne__)
    found = _locate(config.model, config.revision, config, env, formats, _MODEL_FILES)
    gguf = found if found.suffix == ".gguf" and found.is_file() else _only_gguf(found)
    return gguf_parts(gguf)[0] if gguf else found


def locate_tokenizer(config: ModelConfig, env: Env) -> Path | None:
    """Return the directory of `--tokenizer`. `None` if the model's own tokenizer is used.

    Blocks until: a download has finished.

    Raises:
        ConfigError: as for `locate_model`.
    """
    if config.tokenizer is None:
        return None
    revision = config.tokenizer_revision or (config.revision if config.tokenizer == config.model else None)
    return _locate(config.tokenizer, revision, config, env, [None], _TOKENIZER_FILES)


def locate_adapter(name: str, download_dir: str | None, env: Env) -> Path:
    """Return the local directory of an adapter, downloading it if no local path has that name.

    Blocks until: the download, if any, has finished.

    Args:
        name: a path, or the hub id of an adapter, optionally followed by `@` and a revision.
        download_dir: for downloads. `None`: the hub's own cache.
        env: says whether downloads are forbidden.

    Raises:
        ConfigError: it does not exist, or cannot be downloaded; the hint says what to do.
    """
    if (path := Path(name).expanduser()).exists():
        return path.absolute()
    hub_id, _, revision = name.partition("@")
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(hub_id):
        raise ConfigError(f"no such directory: {path}", hint="check the path, or use a hub id: org/name")
    hub = _Hub("adapter", hub_id, revision or None, download_dir, None)
    cached = _cached(hub, [None], _ADAPTER_FILES)
    is_complete = cached and all(any((cached / name).is_file() for name in names) for names in _ADAPTER_PARTS)
    return cached if cached and is_complete else _downloaded(hub, env, [None], _ADAPTER_FILES)


def _locate(
    name: str,
    revision: str | None,
    config: ModelConfig,
    env: Env,
    formats: Sequence[str | None],
    patterns: list[str],
) -> Path:
    """Return the directory. `formats`: of weights; the first format that the repository has is required."""
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ConfigError(f"no such file or directory: {path}", hint="check the path")
    hub = _Hub("model", name, revision, config.download_dir, config.hf_token)
    return _cached(hub, formats, patterns) or _downloaded(hub, env, formats, patterns)


def _only_gguf(directory: Path) -> Path | None:
    """Return the .gguf file, or one part of it, of a directory without other model files."""
    if not directory.is_dir() or (directory / "config.json").is_file():
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1 and not set(files) <= set(gguf_parts(files[0])):
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{directory} holds several models: {names}", hint="name one of the files")
    return files[0] if files else None


def _cached(hub: _Hub, formats: Sequence[str | None], patterns: list[str]) -> Path | None:
    """Return the files' directory in the hub cache. `None` if some are missing."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hub.snapshot(formats[0], patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ConfigError(
            f"neither an existing path nor a valid hub id: {hub.name}", hint="use org/name or a path"
        ) from error
    return path if any(load_format is None or _is_complete(path, load_format) for load_format in formats) else None


def _is_complete(path: Path, load_format: str) -> bool:
    """Return whether a snapshot has all weights; an interrupted download lacks some files."""
    index = read_json(path / LAYOUTS[load_format].index).get("weight_map", {})
    return has_weights(path, load_format) and all((path / file).is_file() for file in index.values())


def _downloaded(hub: _Hub, env: Env, formats: Sequence[str | None], patterns: list[str]) -> Path:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    name = hub.name
    elsewhere = f"on a machine with network: hf download {name}; copy the directory here and give its path"
    if env.is_offline:
        raise ConfigError(
            f"{name} is neither a local path nor complete in the hub cache, and HF_HUB_OFFLINE=1 forbids a download",
            hint=f"unset HF_HUB_OFFLINE, or {elsewhere}",
        )
    try:
        for load_format in formats:
            path = Path(hub.snapshot(load_format, patterns))
            if load_format is None or has_weights(path, load_format):
                break
        return path
    except GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: it needs an account that has accepted its terms",
            hint=f"accept the terms on the {hub.kind}'s page, then: hf auth login, or --hf-token",
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {hub.revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"no {hub.kind} named {name}, neither locally nor on the hub",
            hint=f"check the name; a private {hub.kind} needs: hf auth login, or --hf-token",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{name} is not a local path, and the download failed: {reason}", hint=elsewhere) from error
