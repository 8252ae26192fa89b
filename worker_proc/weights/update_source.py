"""Sources of the weights of an update: a checkpoint, or a trainer that broadcasts them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

from octavo.protocol.config import ModelFacts, ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.identity import weights_digest
from octavo.protocol.weight_files import LAYOUTS, has_weights
from octavo.protocol.weights import Transfer
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.weights.reader import read_weights
from octavo.worker_proc.weights.transfer import WeightReceiver, shapes_of

_NOT_OF_WEIGHTS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of config.json that may differ between two sets of weights for one model."""

Wants = Callable[[str], bool]
"""Whether a tensor is needed."""
Weights = Iterator[tuple[str, Tensor | QuantizedMatrix]]


class Source(Protocol):
    """Weights under the names of a checkpoint."""

    def shapes(self, wants: Wants) -> Weights:
        """Yield the weights that `read` would, without values."""

    def read(self, wants: Wants) -> Weights:
        """Yield each tensor."""

    def digest(self) -> str:
        """Return the digest of all weights; "" if the sender names them itself."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files. See `Source`."""

    facts: ModelFacts

    def shapes(self, wants: Wants) -> Weights:
        """See `Source`."""
        return without_values(self.read(wants))

    def read(self, wants: Wants) -> Weights:
        """See `Source`."""
        return read_weights(self.facts, lambda fraction: None, wants)

    def digest(self) -> str:
        """See `Source`."""
        return weights_digest(self.facts)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tensors of a trainer, each of which comes once. See `Source`."""

    receiver: WeightReceiver
    transfer: Transfer

    def shapes(self, wants: Wants) -> Weights:
        """See `Source`."""
        return shapes_of(self.transfer, wants)

    def read(self, wants: Wants) -> Weights:
        """See `Source`."""
        return self.receiver.receive(self.transfer, wants)

    def digest(self) -> str:
        """See `Source`."""
        return ""


def facts_of_update(config: ResolvedConfig, path: Path) -> ModelFacts:
    """Return the facts of the engine's model with the weights in `path`.

    Raises:
        ConfigError: there are no facts, or they belong to another model.
    """
    if not path.exists():
        raise ConfigError(f"no checkpoint in {path}", hint="the path must exist on the machine of the engine")
    load_format = _load_format(path)
    if (load_format == "gguf") != (config.model.load_format == "gguf"):
        raise ConfigError(
            f"{path} has weights in format {load_format}, and the engine was started with {config.model.load_format}",
            hint="quantized and unquantized weights cannot take each other's place: replace the engine",
        )
    if (own := path / "config.json").is_file():
        _require_same_model(config.model.hf_config, own)
    return msgspec.structs.replace(config.model, model_path=str(path), load_format=load_format)


def _load_format(path: Path) -> Any:
    if path.is_file():
        return "gguf" if path.suffix == ".gguf" else "safetensors" if path.suffix == ".safetensors" else "pt"
    found = next((name for name in LAYOUTS if has_weights(path, name)), None)
    if found is None:
        raise ConfigError(f"no weights in {path}", hint="it needs *.safetensors, or files of torch.save")
    return found


def _require_same_model(expected: dict[str, Any], path: Path) -> None:
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    shared = (expected.keys() & given.keys()) - _NOT_OF_WEIGHTS
    if ("quantization_config" in expected) != ("quantization_config" in given):
        raise ConfigError(f"{path}: quantization_config differs from that of the engine's model")
    for key in sorted(shared):
        if given[key] != expected[key]:
            raise ConfigError(
                f"{path} belongs to another model: {key} is {given[key]!r}, and {expected[key]!r} in the engine's",
                hint="an update exchanges weights only: start or replace an engine for another model",
            )


def without_values(weights: Weights) -> Weights:
    """Yield shapes in place of tensors."""
    for name, values in weights:
        yield name, values.to("meta") if isinstance(values, Tensor) else values
