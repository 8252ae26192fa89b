"""GGUF metadata as files in Hugging Face layout, converted once and kept in the cache directory.

Reading the vocabulary of a GGUF file takes seconds; later starts read the converted JSON. The weights stay in the GGUF
file, where the worker reads them.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.frontend.model_files.gguf.config import generation_config, hf_config
from octavo.frontend.model_files.gguf.rope import FACTOR_TENSORS
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import gguf_parts

_FORMAT_VERSION = 4
"""Version of the converted files; increase it when the conversion changes. Other versions are ignored."""


def convert_gguf(path: Path, env: Env) -> Path:
    """Return a directory with config.json, generation_config.json and the tokenizer of a .gguf file, or of its parts.

    Safe if several processes convert the same file at once: each writes its own directory, and the first to rename it
    wins.

    Raises:
        ConfigError: the file is not a GGUF file or is not supported.
    """
    parts = gguf_parts(path)
    target = env.cache_dir / "gguf" / _key(parts)
    if target.is_dir():
        return target
    # Imported here: a start with converted files must not wait for this import.
    from octavo.frontend.model_files.gguf.tokenizer import tokenizer_files

    metadata, tensor_names, rope_factors = _read(parts)
    files = {
        "config.json": hf_config(metadata, tensor_names, rope_factors),
        "generation_config.json": generation_config(metadata),
        **tokenizer_files(metadata),
    }
    _publish(files, target)
    return target


def _key(parts: Sequence[Path]) -> str:
    """Return the name of the converted directory: a hash of everything that affects the conversion."""
    stats = [(path.resolve(), path.stat()) for path in parts]
    files = [f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats]
    identity = "\0".join([*files, str(_FORMAT_VERSION)])
    return f"{parts[0].stem}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"


def _read(parts: Sequence[Path]) -> tuple[dict[str, Any], set[str], dict[str, list[float]]]:
    """Return the metadata, the names of the tensors, and the tensors with factors of rotary frequencies."""
    from gguf import GGUFReader

    files = []
    for path in parts:
        try:
            reader = GGUFReader(path)
            files.append(({name: field.contents() for name, field in reader.fields.items()}, reader.tensors))
        except (ValueError, KeyError, IndexError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(
                f"{path} is not a readable GGUF file: {error}",
                hint="it may be cut short: compare its size with the original, and download it again",
            ) from error
    _check_parts(parts, [metadata for metadata, _ in files])
    tensors = {tensor.name: tensor for _, of_file in files for tensor in of_file}
    metadata = files[0][0]
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        raise ConfigError(
            f"{parts[0].name} and its other parts hold {len(tensors)} tensors, not {metadata['split.tensors.count']}",
            hint="download all parts again",
        )
    factors = {name: tensors[name].data.astype(float).tolist() for name in FACTOR_TENSORS if name in tensors}
    return metadata, set(tensors), factors


def _check_parts(parts: Sequence[Path], metadata: Sequence[Mapping[str, Any]]) -> None:
    for index, (path, fields) in enumerate(zip(parts, metadata, strict=True)):
        number, count = fields.get("split.no", 0), fields.get("split.count", 0) or 1
        if (number, count) != (index, len(parts)):
            raise ConfigError(
                f"{path.name} holds part {number + 1} of a model of {count} files, which its name does not say",
                hint=f"give it the name that llama.cpp gives it, NAME-{number + 1:05}-of-{count:05}.gguf",
            )


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
            hint="OCTAVO_CACHE names a directory that can be written",
        ) from error
