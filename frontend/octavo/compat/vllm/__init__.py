"""vLLM's Python API, as of vLLM 0.32, on octavo: its names, signatures and meanings.

`from octavo.compat import vllm` takes the place of `import vllm`. `python -m octavo.compat.vllm script.py` runs a
script that imports `vllm` as it is. What is here and what is not: docs/vllm-compatibility.md.

Loads nothing until a name is used (PEP 562).
"""

from octavo.compat.vllm.importer import VllmFinder, member
from octavo.compat.vllm.names import NAMES

__version__ = "0.32.0"
"""The release of vLLM whose API this is."""
__version_tuple__ = (0, 32, 0)

VllmFinder.install(__name__)


def __getattr__(name: str) -> object:
    """Return a member of vLLM's top-level module, or one of its modules."""
    return member("vllm", __name__, name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(NAMES["vllm"])
