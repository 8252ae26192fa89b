"""Chooses the reader of a checkpoint by its load format, and reports progress."""

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from octavo.protocol.config import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import weight_files
from octavo.worker_proc.models.linear_weight import QuantizedMatrix

_MIN_PROGRESS_STEP = 0.02

Wants = Callable[[str], bool]


def read_weights(
    facts: ModelFacts, report: Callable[[float], None], wants: Wants
) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """Yield the weights of a checkpoint under their Hugging Face names, in most cases as views of mapped files.

    Args:
        facts: facts of a model whose `load_format` is not "dummy".
        report: called with the fraction of bytes read so far, 0 to 1; rate-limited.
        wants: whether a tensor is needed; others are not read.

    Raises:
        ConfigError: a file is missing, damaged or not supported.
    """
    tensors, num_bytes = _open(facts, wants)
    num_read, reported = 0, 0.0
    for name, tensor, tensor_bytes in tensors:
        yield name, tensor
        num_read += tensor_bytes
        if num_read / num_bytes >= reported + _MIN_PROGRESS_STEP:
            reported = min(1.0, num_read / num_bytes)
            report(reported)


def _open(facts: ModelFacts, wants: Wants) -> tuple[Iterator[tuple[str, Tensor | QuantizedMatrix, int]], int]:
    """Return the tensors, each with its bytes, and the bytes of all files.

    Each reader is imported only when its format is needed: importing the gguf package takes 0.1 s.
    """
    checkpoint = weight_files(Path(facts.model_path), facts.load_format)
    num_bytes = sum(map(_file_bytes, checkpoint.files))
    match facts.load_format:
        case "gguf":
            from octavo.worker_proc.weights.gguf import read_gguf

            return read_gguf(checkpoint.files[0], wants), num_bytes
        case "safetensors":
            from octavo.worker_proc.weights.safetensors import read_safetensors

            if facts.hf_config.get("quantization_config"):
                from octavo.worker_proc.weights.quantized.assembly import read_quantized

                return read_quantized(checkpoint, facts.hf_config["quantization_config"], wants), num_bytes
            return read_safetensors(checkpoint, wants), num_bytes
        case "mistral":
            from octavo.worker_proc.weights.mistral import read_mistral

            return read_mistral(checkpoint, facts, wants), num_bytes
        case "pt":
            from octavo.worker_proc.weights.pytorch import read_pytorch

            return read_pytorch(checkpoint, wants), num_bytes
    raise ConfigError(f"no reader for load format {facts.load_format!r}")


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
