"""Reads an adapter's configuration and the names, types and shapes of its tensors, and checks them.

The workers check the numbers, and whether each module is a layer that adapters can change.
"""

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.frontend.generation.soft_prompt import has_soft_prompt, read_soft_prompt
from octavo.protocol.adapters import Adapter, adapter_digest, adapter_files
from octavo.protocol.config import ModelFacts, ResolvedConfig
from octavo.protocol.errors import ConfigError, InvalidRequestError
from octavo.protocol.peft_lora import MERGE, PeftLora, read_peft_lora
from octavo.protocol.peft_tensors import StoredTensor, places_of
from octavo.protocol.weight_files import weight_files

Header = dict[str, StoredTensor]

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
        settings = read_peft_lora(settings_file.read_bytes(), str(settings_file))
        if (rank := settings.max_rank) > config.lora.max_rank:
            limit = f"--max-lora-rank {config.lora.max_rank}"
            raise InvalidRequestError(f"the adapter has rank {rank}, but the limit is {limit}", "lora_path")
        if weights_file.suffix == ".safetensors":
            _check_tensors(read_header(weights_file), settings, str(weights_file), config.model)
        return Adapter(name, adapter_digest(directory), str(directory), rank)
    except ConfigError as error:
        hint = f" ({error.hint})" if error.hint else ""
        raise InvalidRequestError(f"{error.message}{hint}", "lora_path") from error
    except OSError as error:
        raise InvalidRequestError(f"cannot read the adapter in {directory}: {error.strerror}", "lora_path") from error


def read_header(file: Path) -> Header:
    """Return the types and shapes of the tensors in a safetensors file, by name.

    Raises:
        ConfigError: the file is damaged.
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            fields: Any = json.loads(stream.read(length)) if length <= _MAX_HEADER_BYTES else None
            entries = {name: entry for name, entry in fields.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            if file.stat().st_size != 8 + length + end:
                raise ValueError("data is missing, or there is too much")
            return {
                name: StoredTensor(entry["dtype"], "F" in entry["dtype"], tuple(entry["shape"]))
                for name, entry in entries.items()
            }
        except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError):
            message = f"{file} is not a safetensors file, or is damaged or cut short"
            raise ConfigError(message, hint="save the adapter again") from None


def _check_tensors(header: Header, settings: PeftLora, where: str, model: ModelFacts) -> None:
    """Check the tensors of an adapter, and compare them with the weights of the base model that have the same names.

    Raises:
        ConfigError: the tensors are not an adapter that can be served.
        InvalidRequestError: the adapter was made for another model.
    """
    weights, places = _weight_header(model.model_path, model.load_format), places_of(header, settings, where)
    for name in sorted(places, key=lambda name: places[name].factor != "base"):
        place, shape = places[name], header[name].shape
        weight = weights.get(f"{place.module}.weight")
        # Integers may be packed floats, as those of bitsandbytes and NVFP4: their shape is not that of the matrix.
        if place.is_stack or weight is None or not weight.is_float or len(weight.shape) != 2:
            continue
        if place.factor == "base":
            fits, cause = sorted(shape) == sorted(weight.shape), f"tokens were added before training; {MERGE}"
        else:
            fits, cause = shape[_OTHER_DIMENSION[place.factor]] in weight.shape, "the adapter belongs to another model"
        if not fits:
            raise InvalidRequestError(
                f"{name} has the shape {shape}, but the model's {place.module}.weight has {weight.shape}: {cause}",
                "lora_path",
            )


@lru_cache(maxsize=4)
def _weight_header(model_path: str, load_format: str) -> Header:
    """Return the types and shapes of a model's weights. `{}` if they have another format or are not on this machine."""
    if load_format != "safetensors":
        return {}
    header: Header = {}
    try:
        for file in weight_files(Path(model_path), load_format).files:
            header |= read_header(file)
    except (OSError, ConfigError):
        return {}
    return header
