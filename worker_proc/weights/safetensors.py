"""Reads safetensors files.

Files are memory-mapped; a tensor becomes resident only while the model copies it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import WeightFiles
from octavo.worker_proc.weights.shards import check_contents, unreadable

_QUANTIZED_TYPES = frozenset({"F8_E4M3", "F8_E8M0"})
_UNSUPPORTED_TYPES = frozenset({"F8_E5M2", "F4", "F6_E2M3", "F6_E3M2"})


def read_header(checkpoint: WeightFiles) -> tuple[set[str], dict[str, str]]:
    """Return the names of all tensors, and the metadata of all files.

    Raises:
        ConfigError: a file is damaged.
    """
    names: set[str] = set()
    metadata: dict[str, str] = {}
    for path in checkpoint.files:
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
                metadata |= file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from error
    return names, metadata


def read_safetensors(
    checkpoint: WeightFiles, wants: Callable[[str], bool] = lambda name: True, *, is_quantized: bool = False
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield every wanted tensor as (name, tensor, its bytes).

    Args:
        checkpoint: files of the checkpoint.
        wants: whether a tensor is needed.
        is_quantized: whether tensors may be codes and scales of 8-bit floats.

    Raises:
        ConfigError: a file is damaged, lacks tensors or holds a type that this release does not compute with.
    """
    for path in checkpoint.files:
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from error
        with file:
            check_contents(checkpoint, path, file.keys())
            for name in filter(wants, file.keys()):
                type_name = file.get_slice(name).get_dtype()
                if type_name in _UNSUPPORTED_TYPES or (type_name in _QUANTIZED_TYPES and not is_quantized):
                    raise ConfigError(
                        f"tensor {name} in {path.name} is of type {type_name}, which is not supported",
                        hint="use a checkpoint in bfloat16, float16 or float32, or a GGUF file",
                    )
                tensor = file.get_tensor(name)
                yield name, tensor, tensor.nbytes
