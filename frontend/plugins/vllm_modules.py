"""vLLM's modules while a plugin is loaded: those of `octavo.compat.vllm`, if vLLM itself is not installed."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from octavo.compat.vllm.importer import VllmFinder

_ROOT = "vllm"


def has_vllm() -> bool:
    """Return whether vLLM itself is installed; its plugins then import from it.

    A folder of this name on the path is not vLLM, nor are the modules of `octavo.compat.vllm` under its name.
    """
    spec = importlib.util.find_spec(_ROOT)
    return spec is not None and spec.origin is not None


@contextmanager
def vllm_modules() -> Iterator[None]:
    """Let `import vllm...` find octavo's modules; what was there before comes back."""
    hidden = _take_out()
    finder = VllmFinder(_ROOT)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _take_out()
        sys.modules.update(hidden)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _ROOT]
    return {name: sys.modules.pop(name) for name in names}
