"""LoRA adapters on the wire: which adapter a request uses, and which adapters workers must load before a step.

An adapter is a directory in PEFT's layout. It is identified by the digest of its content, because a name may later
refer to other content.
"""

import hashlib
from pathlib import Path

import msgspec

from octavo.protocol.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the weight file. The first one that exists is read."""

NO_ADAPTER = -1
"""The adapter slot of a request that uses the base model."""

_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


class Adapter(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An adapter that a frontend has checked, with everything that a new worker needs to load it."""

    name: str
    """Name for logs and events. Different adapters may have had the same name."""
    digest: str
    """`adapter_digest` of its files when it was checked."""
    path: str
    """Directory of its files, on every machine with workers."""
    rank: int
    """The largest rank of its modules. 0 for a soft prompt, which frontends prepend to prompts and which the core and
    the workers never see."""

    @property
    def is_soft_prompt(self) -> bool:
        """Whether it consists of prompt rows instead of LoRA factors."""
        return self.rank == 0


class AdapterLoad(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Load an adapter into a slot. Neither this step nor a later one uses the slot's previous adapter.

    A step in flight may still use it: loads take place between steps, in plan order.
    """

    slot: int
    """0 to `max_loras` - 1."""
    adapter: Adapter


class AdapterFault(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A load that has failed. The slot is empty afterwards.

    Until the core knows, plans may still admit requests to the slot. They are computed without an adapter, and their
    results are ignored.
    """

    slot: int
    digest: str
    message: str
    """Names the field or tensor at fault, and the remedy."""


def adapter_files(path: Path) -> tuple[Path, Path]:
    """Return the paths of an adapter's configuration and weights.

    Raises:
        ConfigError: one of them is missing.
    """
    config = path / CONFIG_FILE
    weights = next((file for name in WEIGHT_FILES if (file := path / name).is_file()), None)
    if not config.is_file() or weights is None:
        missing = " or ".join(WEIGHT_FILES) if config.is_file() else CONFIG_FILE
        raise ConfigError(
            f"{path} is not a LoRA adapter: it has no {missing}",
            hint="name a directory that peft's save_pretrained has written",
        )
    return config, weights


def adapter_digest(path: Path) -> str:
    """Return the digest of an adapter's configuration and weights in hexadecimal digits. Reads both files completely.

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
