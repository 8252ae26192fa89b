"""Makes vLLM's modules importable: their names are resolved through `names.py` when they are first used."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from octavo.compat.vllm.names import NAMES
from octavo.frontend.vllm_environment import KNOWN
from octavo.protocol.env import named


class VllmFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's modules below a root name: `vllm` itself, or `octavo.compat.vllm`.

    Args:
        root: name that stands for vLLM's top-level module.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    @classmethod
    def install(cls, root: str, *, is_first: bool = False) -> None:
        """Make imports of `root` and of modules below it find vLLM's modules.

        Args:
            root: as in the constructor.
            is_first: take precedence over an installed package of this name.
        """
        if is_first:
            sys.meta_path.insert(0, cls(root))
        else:
            sys.meta_path.append(cls(root))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of vLLM's modules. `None` if the name is not below the root."""
        del path, target
        if (vllm_name := self._vllm_name(fullname)) is None:
            return None
        if not _is_module(vllm_name):
            raise ModuleNotFoundError(
                f"octavo has no {vllm_name}: docs/vllm-compatibility.md lists the modules of vLLM that it has",
                name=fullname,
            )
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Initialize a module."""
        vllm_name = self._vllm_name(module.__name__)
        assert vllm_name is not None
        module.__getattr__ = _getter(vllm_name, module.__name__)  # type: ignore[method-assign]
        module.__all__ = sorted(NAMES.get(vllm_name, ()))  # type: ignore[attr-defined]

    def _vllm_name(self, fullname: str) -> str | None:
        """Return the name of a module in vLLM."""
        if fullname == self._root or fullname.startswith(self._root + "."):
            return "vllm" + fullname[len(self._root) :]
        return None


def member(vllm_name: str, module: str, name: str) -> object:
    """Return the object that vLLM's module `vllm_name` has under a name; `module` is the module's name in this process.

    Raises:
        AttributeError: octavo does not have it.
    """
    if (found := NAMES.get(vllm_name, {}).get(name)) is not None:
        home, ours = found
        return getattr(import_module(home), ours)
    if vllm_name == "vllm.envs":
        return _variable(name)
    if _is_module(f"{vllm_name}.{name}"):
        return import_module(f"{module}.{name}")
    raise AttributeError(
        f"octavo has no {vllm_name}.{name}: docs/vllm-compatibility.md lists the names of vLLM that it has"
    )


def _getter(vllm_name: str, module: str) -> Callable[[str], object]:
    return lambda name: member(vllm_name, module, name)


def _is_module(vllm_name: str) -> bool:
    return vllm_name in NAMES or any(known.startswith(vllm_name + ".") for known in NAMES)


_VARIABLES = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 5, "VLLM_LOGGING_LEVEL": "INFO"}
"""Variables that scripts read from `vllm.envs`, with vLLM's defaults."""


def _variable(name: str) -> object:
    """Return a variable of `vllm.envs` from the environment, as an integer if possible.

    Raises:
        AttributeError: it is not set, and octavo does not know its default.
    """
    is_set = name.startswith("VLLM_") and name in named(name)
    if not is_set and name not in _VARIABLES and name not in KNOWN:
        raise AttributeError(f"octavo does not know the default of vllm.envs.{name}: set it in the environment")
    value: object = named(name).get(name, _VARIABLES.get(name))
    return int(value) if isinstance(value, str) and value.isdigit() else value
