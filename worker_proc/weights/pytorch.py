"""Reads what `torch.save` wrote: `pytorch_model.bin` and the like.

Such files are pickles. They are read by torch's restricted unpickler (`weights_only`), which builds only tensors and
containers, calls nothing else, and refuses files that need more.
"""

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import WeightFiles
from octavo.worker_proc.weights.shards import check_contents, unreadable

logger = logging.getLogger(__name__)

_ZIP = b"PK"


def read_pytorch(
    checkpoint: WeightFiles, wants: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield every wanted tensor as (name, tensor, its bytes).

    Tensors are views of the mapped file, except in the format of torch before 1.6, which is read completely.

    Raises:
        ConfigError: a file is damaged, lacks tensors, or holds anything else than named tensors.
    """
    for file in checkpoint.files:
        tensors = read_tensors(file)
        check_contents(checkpoint, file, tensors)
        for name in list(tensors):
            tensor = tensors.pop(name)
            if wants(name):
                yield name, tensor.detach(), tensor.nbytes


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of `torch.save`, mapped where possible. No code of the file runs.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        with file.open("rb") as opened:
            is_mapped = opened.read(len(_ZIP)) == _ZIP
        if not is_mapped:
            logger.info("%s is in the format of torch before 1.6, which cannot be mapped: it is read whole", file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise _refused(file, error) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise unreadable(file, error) from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        kind = type(content).__name__ if not isinstance(content, Mapping) else "something else than tensors"
        raise ConfigError(
            f"{file} holds {kind}; expected tensors by name",
            hint="save the state_dict of the model: torch.save(model.state_dict(), ...)",
        )
    return dict(content)


def _refused(file: Path, error: Exception) -> ConfigError:
    """Return the error for a file that the restricted unpickler refuses, or that is not a pickle."""
    if "GLOBAL" in str(error):
        return ConfigError(
            f"{file} holds objects whose code would have to run to restore them, which octavo never does",
            hint="convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors",
        )
    return unreadable(file, pickle.UnpicklingError("it is not a file of torch.save"))
