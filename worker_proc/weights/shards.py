"""Code shared by readers of checkpoints in several files: reporting damage."""

from collections.abc import Collection
from pathlib import Path

from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import WeightFiles

_GIT_LFS_POINTER = b"version https://git-lfs"


def unreadable(file: Path, error: Exception) -> ConfigError:
    """Return the error for a file that its library cannot read."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_GIT_LFS_POINTER)) == _GIT_LFS_POINTER
    except OSError as caught:
        return ConfigError(f"cannot read {file}: {caught.strerror}")
    if is_pointer:
        return ConfigError(f"{file} is not the file but its Git LFS pointer", hint="run: git lfs pull")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"cannot read {file} ({size} bytes): {reason}", hint="the file is damaged or cut short")


def check_contents(checkpoint: WeightFiles, file: Path, names: Collection[str]) -> None:
    """Raise `ConfigError` if a file lacks tensors that the index assigns to it.

    Args:
        checkpoint: checkpoint that the file belongs to.
        file: file of the checkpoint.
        names: names of the tensors in the file.
    """
    missing = sorted(checkpoint.expected_in(file).difference(names))
    if missing and checkpoint.index is not None:
        raise ConfigError(
            f"{file} lacks {len(missing)} tensors that {checkpoint.index.name} expects in it: {', '.join(missing[:4])}"
            + (", ..." if len(missing) > 4 else ""),
            hint="the index and the file belong to different versions of the model: download both again",
        )
