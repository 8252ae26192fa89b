"""Reads an adapter's configuration and the names and shapes of its tensors, and checks them as far as that is cheap.

The workers read the weights, and check them against the modules of their part of the model.
"""

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.frontend.generation.soft_prompt import has_soft_prompt, read_soft_prompt
from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.adapters import Adapter, adapter_digest, adapter_files
from octavo.protocol.config import ModelFacts, ResolvedConfig
from octavo.protocol.errors import ConfigError, InvalidRequestError
from octavo.protocol.peft_lora import module_of, read_peft_lora
from octavo.protocol.weight_files import weight_files

Shapes = dict[str, list[int]]

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

_OTHER_DIMENSION: dict[str, int] = {"A": 1, "B": 0, "embedding_A": 1, "embedding_B": 0}
"""For each of PEFT's factors: the dimension that is not the rank."""


def read_adapter(name: str, path: str, config: ResolvedConfig) -> Adapter:
    """Return an adapter whose configuration and shapes fit the engine. Reads the files completely, for their digest.

    Args:
        name: name of the adapter.
        path: directory of its files.
        config: configuration of the engine.

    Raises:
        InvalidRequestError: the adapter does not fit; the message names the field or the tensor.
    """
    directory = Path(path).expanduser().absolute()
    try:
        if has_soft_prompt(directory):
            read_soft_prompt(directory, config)
            return Adapter(name, adapter_digest(directory), str(directory), 0)
    except ConfigError as error:
        raise InvalidRequestError(error.message, "lora_path") from error
    except OSError as error:
        raise InvalidRequestError(f"cannot read the adapter in {directory}: {error.strerror}", "lora_path") from error
    if config.lora is None:
        raise InvalidRequestError("this engine has no adapters: start it with --enable-lora", "lora_request")
    try:
        settings_file, weights_file = adapter_files(directory)
        rank = read_peft_lora(settings_file.read_bytes(), str(settings_file)).max_rank
        if rank > config.lora.max_rank:
            limit = f"--max-lora-rank {config.lora.max_rank}"
            raise InvalidRequestError(f"the adapter has rank {rank}, but the limit is {limit}", "lora_path")
        if weights_file.suffix == ".safetensors":
            _check_shapes(read_shapes(weights_file), str(weights_file), config.model)
        return Adapter(name, adapter_digest(directory), str(directory), rank)
    except ConfigError as error:
        hint = f" ({error.hint})" if error.hint else ""
        raise InvalidRequestError(f"{error.message}{hint}", "lora_path") from error
    except OSError as error:
        raise InvalidRequestError(f"cannot read the adapter in {directory}: {error.strerror}", "lora_path") from error


def base_model_of(path: str) -> str | None:
    """Return the name of an adapter's base model, from its configuration."""
    name = read_json(Path(path) / "adapter_config.json").get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def read_shapes(file: Path) -> Shapes:
    """Return the shapes of the tensors in a safetensors file, by name.

    Raises:
        ConfigError: the file is damaged.
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: Any = json.loads(stream.read(length)) if length <= _MAX_HEADER_BYTES else None
            return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        except (struct.error, ValueError, TypeError, KeyError, AttributeError):
            message = f"{file} is not a safetensors file, or is damaged"
            raise ConfigError(message, phase="reading an adapter", hint="save the adapter again") from None


def _check_shapes(shapes: Shapes, where: str, model: ModelFacts) -> None:
    """Compare the factors with the weights of the base model that have the same names.

    Raises:
        ConfigError: a tensor is not a part of an adapter that can be served.
        InvalidRequestError: the adapter was made for another model.
    """
    weights = _weight_shapes(model.model_path, model.load_format)
    for tensor, shape in shapes.items():
        module, factor = module_of(tensor, where)
        place, weight = _OTHER_DIMENSION.get(factor), weights.get(f"{module}.weight", [])
        if place is not None and len(shape) == len(weight) == 2 and shape[place] not in weight:
            raise InvalidRequestError(
                f"{tensor} has the shape {shape}, but the model's {module}.weight has {weight}: the adapter belongs to "
                "another base model",
                "lora_path",
            )


@lru_cache(maxsize=4)
def _weight_shapes(model_path: str, load_format: str) -> Shapes:
    """Return the shapes of a model's weights. `{}` if they have another format or are not on this machine."""
    if load_format != "safetensors":
        return {}
    shapes: Shapes = {}
    try:
        for file in weight_files(Path(model_path), load_format).files:
            shapes |= read_shapes(file)
    except (OSError, ConfigError):
        return {}
    return shapes
