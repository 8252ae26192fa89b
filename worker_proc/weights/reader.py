"""Chooses the reader of a checkpoint by its load format, and tells how far the reading has come."""

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from octavo.protocol.config import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights import gguf, safetensors

_MIN_PROGRESS_STEP = 0.02


def read_weights(facts: ModelFacts, report: Callable[[float], None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint under their Hugging Face names.

    Args:
        facts: whose `load_format` is "safetensors" or "gguf".
        report: called with the share of bytes read so far, 0 to 1, not more often than is useful.

    Raises:
        ConfigError: the root cause in one line: a file is missing, damaged or not supported.
    """
    path = Path(facts.model_path)
    if facts.load_format == "gguf":
        tensors, num_bytes = gguf.read_gguf(path), _file_bytes(path)
    elif facts.load_format == "safetensors":
        tensors, num_bytes = safetensors.read_safetensors(path), safetensors.total_bytes(path)
    else:
        raise ConfigError(f"no reader for load format {facts.load_format!r}")
    num_read, reported = 0, 0.0
    for name, tensor, tensor_bytes in tensors:
        yield name, tensor
        num_read += tensor_bytes
        if num_read / num_bytes >= reported + _MIN_PROGRESS_STEP:
            reported = min(1.0, num_read / num_bytes)
            report(reported)


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
