"""vLLM's Python API on octavo, as of vLLM 0.32: its names, signatures and meanings.

`from octavo.compat import vllm` replaces `import vllm`. `python -m octavo.compat.vllm script.py` runs an unchanged
script that imports `vllm`. docs/vllm-compatibility.md lists what is supported.

Loads nothing until a name is used (PEP 562).
"""

from octavo.compat.vllm.importer import VllmFinder, member
from octavo.compat.vllm.names import NAMES

__version__ = "0.32.0"
"""The vLLM release whose API this is."""
__version_tuple__ = (0, 32, 0)

VllmFinder.install(__name__)


def __getattr__(name: str) -> object:
    """Return a member of vLLM's top-level module, or one of its modules."""
    return member("vllm", __name__, name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(NAMES["vllm"])
