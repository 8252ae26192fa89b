"""The small chat model that `scripts/serve` starts with, for tests that need real weights."""

import subprocess
import sys
from functools import cache
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_default_model.py"


class DefaultModelMissing(Exception):
    """The model is not in the cache and could not be fetched."""


@cache
def default_model() -> Path:
    """Return the path of the GGUF file, fetching it if it is not in the cache.

    Raises:
        DefaultModelMissing: with the script's output, and how to run the tests that need no model.
    """
    done = subprocess.run([sys.executable, "-P", SCRIPT], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DefaultModelMissing(f"{SCRIPT.name} failed:\n{done.stderr}\nThe other tests: scripts/test -m 'not model'")
    return Path(done.stdout.strip())
