"""GGUF metadata as files in Hugging Face layout, converted once and kept in the cache directory.

Reading a GGUF takes seconds because of its vocabulary; later starts read the JSON made from it. The
weights stay in the file, where the worker reads them.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from octavo.frontend.model_files.gguf.config import generation_config, hf_config
from octavo.frontend.model_files.gguf.metadata import PHASE
from octavo.frontend.model_files.gguf.rope import FACTOR_TENSORS
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError

_FORMAT_VERSION = 4
"""Version of the converted files; increase it when the conversion changes. Other versions are ignored."""


def convert_gguf(path: Path, env: Env) -> Path:
    """Return a directory with config.json, generation_config.json and the tokenizer of a .gguf file.

    Safe when several processes convert the same file at once: each writes its own directory, and the
    first to rename it wins.

    Raises:
        ConfigError: the file is not a GGUF file or is not supported.
    """
    target = env.cache_dir / "gguf" / _key(path)
    if target.is_dir():
        return target
    # Imported here: a start with converted files must not wait for this import.
    from octavo.frontend.model_files.gguf.tokenizer import tokenizer_files

    metadata, tensor_names, rope_factors = _read(path)
    files = {
        "config.json": hf_config(metadata, tensor_names, rope_factors),
        "generation_config.json": generation_config(metadata),
        **tokenizer_files(metadata),
    }
    _publish(files, target)
    return target


def _key(path: Path) -> str:
    """Return the name of the converted directory: a hash of everything that affects the conversion."""
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_FORMAT_VERSION}"
    return f"{path.stem}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"


def _read(path: Path) -> tuple[dict[str, Any], set[str], dict[str, list[float]]]:
    """Return the metadata, the names of the tensors, and the tensors with factors of rotary frequencies."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}", phase=PHASE) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = {name: tensors[name].data.astype(float).tolist() for name in FACTOR_TENSORS if name in tensors}
    return metadata, set(tensors), factors


def _publish(files: dict[str, Any], target: Path) -> None:
    """Create the directory atomically, complete or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
        try:
            for name, content in files.items():
                text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
                (draft / name).write_text(text, "utf-8")
            draft.chmod(0o755)
            os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if target.is_dir():
            return  # another process was faster and wrote the same files
        raise ConfigError(
            f"cannot write the converted tokenizer to {target}: {error}",
            phase=PHASE,
            hint="OCTAVO_CACHE names a directory that can be written",
        ) from error
