"""Makes vLLM's modules importable while a plugin is loaded: vLLM's own if it is installed, otherwise octavo's."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from octavo.compat.vllm.importer import VllmFinder

_ROOT = "vllm"


def has_vllm() -> bool:
    """Return whether vLLM itself is installed; plugins then import from it.

    A folder named `vllm` on the path does not count, nor do the modules of `octavo.compat.vllm` under that name.
    """
    spec = importlib.util.find_spec(_ROOT)
    return spec is not None and spec.origin is not None


@contextmanager
def vllm_modules() -> Iterator[None]:
    """Make `import vllm...` find octavo's modules inside the `with` statement; restore `sys.modules` afterwards."""
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
