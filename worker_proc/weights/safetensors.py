"""Reads checkpoints in safetensors files: one, several, or several with an index.

Files are memory-mapped; a tensor becomes resident only while the model copies it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.protocol.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_UNSUPPORTED_TYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2"})


def find_shards(folder: Path) -> list[Path]:
    """Return the files that hold the weights, in order.

    Raises:
        ConfigError: there are none, or the index names one that is missing.
    """
    index = folder / INDEX
    if index.exists():
        shards = [folder / name for name in sorted(set(_weight_map(index).values()))]
    elif (folder / SINGLE).exists():
        shards = [folder / SINGLE]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"no .safetensors file in {folder}", hint=_hint_without_files(folder))
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(shards)} weight files named in {index.name} are missing from {folder}: "
            + ", ".join(missing),
            hint="download the model again",
        )
    return shards


def read_safetensors(
    folder: Path, wants: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield every tensor that is wanted as (name, tensor, its bytes).

    Raises:
        ConfigError: a file is missing, damaged or holds a type that this release does not compute with.
    """
    for shard in find_shards(folder):
        try:
            file: Any = safe_open(shard, framework="pt")
        except (SafetensorError, OSError) as error:
            size = shard.stat().st_size
            raise ConfigError(
                f"cannot read {shard} ({size} bytes): {error}", hint="the file is damaged or cut short"
            ) from error
        with file:
            for name in filter(wants, file.keys()):
                type_name = file.get_slice(name).get_dtype()
                if type_name in _UNSUPPORTED_TYPES:
                    raise ConfigError(
                        f"tensor {name} in {shard.name} is of type {type_name}, which is not supported",
                        hint="use a checkpoint in bfloat16, float16 or float32, or a GGUF file",
                    )
                tensor = file.get_tensor(name)
                yield name, tensor, tensor.nbytes


def total_bytes(folder: Path) -> int:
    """Return the size of all weight files."""
    return sum(shard.stat().st_size for shard in find_shards(folder))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {index}: {type(error).__name__}: {error}") from error
    return dict(weight_map)


def _hint_without_files(folder: Path) -> str:
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
        return "it holds PyTorch pickles, which are not read for safety: convert them to safetensors"
    return "use --load-format dummy for random weights"
