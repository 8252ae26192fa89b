"""Runs Python files of the user as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class NotAPythonFileError(Exception):
    """A path does not name a file that can be run as a module."""


def load_module_of_file(path: str, prefix: str) -> ModuleType:
    """Run a Python file and return it as a module.

    Args:
        path: path of the file.
        prefix: the module is called `{prefix}_{name of the file}`, so that it hides no other module.

    Raises:
        NotAPythonFileError: the path is not a Python file, or does not exist.
        Exception: whatever its code raises.
    """
    name = f"{prefix}_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise NotAPythonFileError(f"{path} is not a Python file that can be read")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look there for the names in annotations
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)  # the code may have removed it
        raise
    return module
