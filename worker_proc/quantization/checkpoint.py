"""Reads the tensors of a checkpoint one by one, and writes another checkpoint in files of bounded size."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import has_weights, weight_files
from octavo.worker_proc.weights.safetensors import read_safetensors

_FILE_BYTES = 4 * 2**30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Suffixes of files that hold weights or an index of weights."""
_TEMPLATES = "additional_chat_templates"
"""Directory of a tokenizer's further chat templates; other directories are not copied."""


class Source:
    """A checkpoint in Hugging Face layout.

    Args:
        path: directory of the checkpoint.

    Raises:
        ConfigError: the checkpoint has no safetensors, or is quantized already.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir() or not has_weights(path, "safetensors"):
            raise ConfigError(
                f"{path} has no safetensors files", hint="quantize a checkpoint in Hugging Face layout, not converted"
            )
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        if "quantization_config" in self.config:
            raise ConfigError(f"{path} is quantized already", hint="quantize the original checkpoint")
        self._files = weight_files(path, "safetensors")
        self.num_bytes = sum(file.stat().st_size for file in self._files.files)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, as a view of a mapped file."""
        for name, tensor, _ in read_safetensors(self._files):
            yield name, tensor


class Target:
    """A new directory. Its files have temporary names until the context ends; an error removes the directory.

    Args:
        path: path of the directory: absent or empty.
        source: source whose other files are copied.

    Raises:
        ConfigError: the directory holds files.
    """

    def __init__(self, path: Path, source: Source) -> None:
        require_empty(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._source = source
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            shutil.rmtree(self._path)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors; at most one file's tensors are kept in memory."""
        for name, tensor in tensors:
            if self._pending and self._pending_bytes + tensor.nbytes > _FILE_BYTES:
                self._flush()
            self._pending[name] = tensor.contiguous()
            self._pending_bytes += tensor.nbytes

    def finish(self, quantization_config: dict[str, Any]) -> None:
        """Write the index, the configuration, and copies of the source's other files."""
        self._flush()
        with writing(self._path):
            self._name_files()
            for file in self._source.path.iterdir():
                if file.is_file() and not file.name.endswith(_NOT_COPIED):
                    shutil.copyfile(file, self._path / file.name)
            if (templates := self._source.path / _TEMPLATES).is_dir():
                shutil.copytree(templates, self._path / _TEMPLATES)
            config = {**self._source.config, "quantization_config": quantization_config}
            (self._path / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _name_files(self) -> None:
        """Give the files their final names, and write the index if there are several."""
        total = len(self._files)
        names = [
            "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            for number in range(1, total + 1)
        ]
        for number, name in enumerate(names, 1):
            self._part(number).rename(self._path / name)
        if total > 1:
            weight_map = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (self._path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, number: int) -> Path:
        return self._path / f"part-{number}.tmp"

    def _flush(self) -> None:
        if not self._pending:
            return
        with writing(self._path):
            save_file(self._pending, self._part(len(self._files) + 1), {"format": "pt"})
        self._files.append(list(self._pending))
        self.num_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn errors of the file system into errors that name the output.

    Raises:
        ConfigError: a file or directory cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out} cannot be written: {error}", hint="check free space and permissions there") from error


def require_empty(path: Path) -> None:
    """Check that nothing would be overwritten.

    Raises:
        ConfigError: there is a file, or a directory with files.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"{path} exists already", hint="name another OUT, or remove it")
