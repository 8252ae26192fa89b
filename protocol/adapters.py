"""LoRA adapters on the wire: which adapter a request uses, and which adapters the workers must load before a step.

An adapter is a directory in PEFT's layout. Its identity is the digest of its content: a name may come to mean another
content, but a digest never does.
"""

import hashlib
from pathlib import Path

import msgspec

from octavo.protocol.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""The first one that is there is read."""

NO_ADAPTER = -1
"""The adapter slot of a request that uses the base model."""

_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


class Adapter(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An adapter that a frontend has checked. Everything that a new worker needs to load it."""

    name: str
    """For logs and events; two adapters may have had the same name."""
    digest: str
    """`adapter_digest` of its files when it was checked."""
    path: str
    """Directory of its files, on every machine with workers."""
    rank: int
    """The largest rank of its modules. 0: it is a soft prompt, which frontends put before prompts; the core and the
    workers never see it."""

    @property
    def is_soft_prompt(self) -> bool:
        """Whether it has rows for prompts, and no factors."""
        return self.rank == 0


class AdapterLoad(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Put an adapter into a slot. No request of this step or of a later one uses what the slot had before.

    A step in flight may still use it: the load takes place between the steps, in the order of the plans.
    """

    slot: int
    """0 to `max_loras` - 1."""
    adapter: Adapter


class AdapterFault(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A load that has failed. The slot is empty afterwards.

    Until the core knows, plans may still admit requests to the slot: they are computed as if they had no adapter, and
    their results are ignored.
    """

    slot: int
    digest: str
    message: str
    """Names the field or the tensor at fault and the remedy."""


def adapter_files(path: Path) -> tuple[Path, Path]:
    """Return the configuration and the weights of an adapter.

    Raises:
        ConfigError: one of them is missing.
    """
    config = path / CONFIG_FILE
    weights = next((file for name in WEIGHT_FILES if (file := path / name).is_file()), None)
    if not config.is_file() or weights is None:
        missing = " or ".join(WEIGHT_FILES) if config.is_file() else CONFIG_FILE
        raise ConfigError(
            f"{path} is not a LoRA adapter: it has no {missing}",
            phase="reading an adapter",
            hint="name a directory that peft's save_pretrained has written",
        )
    return config, weights


def adapter_digest(path: Path) -> str:
    """Return the digest of an adapter's configuration and weights, as hexadecimal digits. Reads both whole.

    Raises:
        ConfigError: a file is missing.
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in adapter_files(path):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
