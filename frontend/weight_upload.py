"""Writes named tensors into shared memory as a checkpoint, shard by shard, for the engines of this machine."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from octavo.protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

Tensors: TypeAlias = "Iterable[tuple[str, Tensor]]"

SHARD_BYTES = 2**28
"""Size of a shard in bytes. Tensors are gathered up to this size, so an iterator never has to hold all of them."""


def write_weights(folder: Path, tensors: Tensors) -> None:
    """Write tensors to safetensors files with an index.

    Blocks until: all are written.

    Raises:
        InvalidRequestError: a name occurs twice, a value is not a tensor, or the memory does not suffice.
    """
    from safetensors.torch import save_file  # imports torch, which a client without weights does not need
    from torch import Tensor

    folder.mkdir(mode=0o700)
    file_of: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write() -> None:
        if not shard:
            return
        name = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
        try:
            save_file(shard, folder / name)
        except OSError as error:
            raise InvalidRequestError(
                f"no shared memory for the weights: {error.strerror or error}; enlarge {folder.parent.parent}, or give "
                "the path of a checkpoint",
                "weights",
            ) from error
        file_of.update(dict.fromkeys(shard, name))
        shard.clear()

    num_bytes = 0
    for name, tensor in tensors:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InvalidRequestError("weights must be pairs of a name and a torch tensor", "weights")
        if name in file_of or name in shard:
            raise InvalidRequestError(f"weights has {name!r} twice", "weights")
        # Clone on the CPU, without the storage that views share: safetensors writes neither device tensors nor views.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += shard[name].nbytes
        if num_bytes >= SHARD_BYTES:
            write()
            num_bytes = 0
    write()
    if not file_of:
        raise InvalidRequestError("weights has no tensors", "weights")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def link_files(folder: Path, other: Path) -> None:
    """Create a folder of hard links to the same files, in the same memory."""
    other.mkdir(mode=0o700)
    for file in folder.iterdir():
        os.link(file, other / file.name)
