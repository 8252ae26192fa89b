"""Fetches the source of vLLM 0.32.0 once and prints its directory: its examples and tests run against octavo.

Nothing of it is compiled, installed or committed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fetch_default_model import once

from octavo.protocol.env import Env

VERSION = "0.32.0"


def fetch() -> Path:
    """Return the directory of the source, downloading it if it is not in the cache.

    Blocks while another process fetches it.

    Raises:
        SystemExit: the source cannot be downloaded.
    """
    return once(Env.read().cache_dir / "sources" / f"vllm-{VERSION}", _download)


def _download(path: Path) -> None:
    print(f"fetching the source of vLLM {VERSION} (45 MB, once) into {path.parent}", file=sys.stderr)
    # In the same folder, because a rename works only within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        # pip unpacks a source archive and then reads its metadata, which fails without vLLM's own build tools.
        # The unpacked tree is all that is needed here: --no-clean keeps it.
        pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-clean"]
        source_only = ["--no-build-isolation", "--no-binary", "vllm", "--dest", scratch]
        done = subprocess.run(
            [*pip, *source_only, f"vllm=={VERSION}"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": scratch},
        )
        found = [info.parent for info in Path(scratch).glob("pip-download-*/vllm_*/PKG-INFO")]
        if len(found) != 1 or not (found[0] / "examples").is_dir():
            raise SystemExit(f"pip cannot download the source of vLLM {VERSION}:\n{done.stderr[-2000:]}")
        found[0].rename(path)


if __name__ == "__main__":
    print(fetch())
