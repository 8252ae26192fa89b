"""The key-value pairs of a GGUF file; tracks which of the model's keys were read.

Source of the key names: docs/gguf.md of the ggml project, and the constants of its `gguf` package.
"""

from collections.abc import Mapping, Set
from typing import Any

from octavo.protocol.errors import ConfigError

_HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"})
"""Keys of an architecture that do not affect the computation."""


class GgufMetadata:
    """The metadata of a file about its model.

    Keys are given without the name of the architecture: "block_count" is "llama.block_count".

    Args:
        fields: all key-value pairs of the file.
        tensor_names: from which tied weights, biases and norms are detected.
        rope_factors: the tensors with divisors of the rotary frequencies, by name.

    Raises:
        ConfigError: the file does not name its architecture.
    """

    def __init__(
        self, fields: Mapping[str, Any], tensor_names: Set[str], rope_factors: Mapping[str, list[float]]
    ) -> None:
        self.fields = fields
        self.tensor_names = tensor_names
        self.rope_factors = rope_factors
        self._read: set[str] = set()
        if "general.architecture" not in fields:
            raise ConfigError("the GGUF file has no general.architecture")
        self.architecture = str(fields["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture; for a list of equal members, return one of them.

        Raises:
            ConfigError: the value differs between layers.
        """
        self._read.add(key)
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ConfigError(f"{self.architecture}.{key} differs between layers, which is not supported")
        return value[0]

    def required(self, key: str) -> Any:
        """Return the value of a key that every file of the architecture must have.

        Raises:
            ConfigError: it is missing, or differs between layers.
        """
        value = self.get(key)
        if value is None:
            raise ConfigError(f"the GGUF file has no {self.architecture}.{key}")
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number stored in float32 as its author wrote it: 0.22, not 0.2199999988079071."""
        value = self.get(key, default)
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def per_layer(self, key: str) -> Any:
        """Return a value that may be a list with one member per layer. `None` if there is no such key."""
        self._read.add(key)
        return self.fields.get(f"{self.architecture}.{key}")

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return name in self.tensor_names

    def reject_unread(self) -> None:
        """Raise `ConfigError` if a key of the architecture was not read and is not known to be harmless."""
        prefix = f"{self.architecture}."
        keys = {name.removeprefix(prefix) for name in self.fields if name.startswith(prefix)}
        unread = sorted(keys - self._read - _HARMLESS)
        if unread:
            values = ", ".join(f"{prefix}{key} ({self.fields[prefix + key]!r:.40})" for key in unread)
            raise ConfigError(
                f"the GGUF file has {values}, which octavo does not know and which may change what the model computes",
                hint="use the model's safetensors files",
            )
