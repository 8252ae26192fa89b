"""Determines which files hold a model's weights. Reads only index files."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.protocol.errors import ConfigError

NOT_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "original/*")
"""Files of a training run, and weights in other formats, whose names look like weight files."""


_GGUF_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Layout:
    """The file names of a load format."""

    index: str
    """The index, which maps every tensor to its file."""
    single: str
    patterns: tuple[str, ...]
    """Patterns for files without an index. The files of the first pattern that matches any are used."""
    excluded: tuple[str, ...] = ()


LAYOUTS = {
    "safetensors": Layout(
        "model.safetensors.index.json", "model.safetensors", ("*.safetensors",), ("consolidated*.safetensors",)
    ),
    "pt": Layout("pytorch_model.bin.index.json", "pytorch_model.bin", ("*.bin", "*.pt", "*.pth"), NOT_WEIGHTS),
    "mistral": Layout(
        "consolidated.safetensors.index.json", "consolidated.safetensors", ("consolidated*.safetensors",)
    ),
}
"""Layouts by load format, in the order in which auto tries them."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a checkpoint."""

    files: tuple[Path, ...]
    """Sorted by name."""
    file_of_tensor: Mapping[str, str]
    """File of each tensor according to the index. Empty if there is no index."""
    index: Path | None = None

    def expected_in(self, file: Path) -> set[str]:
        """Return the tensors that the index assigns to a file."""
        return {name for name, home in self.file_of_tensor.items() if home == file.name}


def has_weights(folder: Path, load_format: str) -> bool:
    """Return whether a folder has files of this format, or their index."""
    layout = LAYOUTS[load_format]
    return (folder / layout.index).is_file() or bool(_listed(folder, layout))


def weight_files(path: Path, load_format: str) -> WeightFiles:
    """Return the weight files of a model.

    Args:
        path: its folder, or a single file.
        load_format: one of `LAYOUTS`, or "gguf".

    Raises:
        ConfigError: there are none, the index is damaged, or it names files that are missing.
    """
    if load_format == "gguf":
        return WeightFiles(gguf_parts(path), {})
    if load_format not in LAYOUTS or not path.is_dir():
        return WeightFiles((path,), {})
    layout = LAYOUTS[load_format]
    index = path / layout.index
    if not index.is_file():
        files = _listed(path, layout)
        if not files:
            raise ConfigError(
                f"no weights of format {load_format} in {path}: neither {layout.index} nor {layout.single}",
                hint="check --load-format, or use --load-format dummy for random weights",
            )
        return WeightFiles(tuple(files), {})
    file_of_tensor = _weight_map(index)
    names = sorted(set(file_of_tensor.values()))
    if missing := [name for name in names if not (path / name).is_file()]:
        raise ConfigError(
            f"{len(missing)} of {len(names)} weight files named in {index.name} are missing from {path}: "
            + ", ".join(missing),
            hint="download the model again",
        )
    return WeightFiles(tuple(path / name for name in names), file_of_tensor, index)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a model in GGUF format in order. `path` is one of them; it need not exist.

    llama.cpp splits large models into files like `NAME-00002-of-00003.gguf`. The first one has the metadata.

    Raises:
        ConfigError: some files are missing.
    """
    part = _GGUF_PART.fullmatch(path.name)
    if part is None:
        return (path,)
    count = int(part["count"])
    parts = tuple(path.with_name(f"{part['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if missing := [file.name for file in parts if not file.is_file()]:
        raise ConfigError(
            f"{len(missing)} of the {count} files of {part['stem']} are missing from {path.parent}: "
            + ", ".join(missing[:4])
            + (", ..." if len(missing) > 4 else ""),
            hint="download them into the same directory",
        )
    return parts


def _listed(folder: Path, layout: Layout) -> list[Path]:
    if (folder / layout.single).is_file():
        return [folder / layout.single]
    for pattern in layout.patterns:
        files = [file for file in sorted(folder.glob(pattern)) if not any(map(file.match, layout.excluded))]
        if files:
            return files
    return []


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {index}: {type(error).__name__}: {error}") from error
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ConfigError(f"cannot read {index}: its weight_map does not name the file of each tensor")
    return weight_map
