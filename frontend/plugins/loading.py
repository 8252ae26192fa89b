"""Loads the Python files of `--tool-parser-plugin` and `--reasoning-parser-plugin`."""

import contextlib
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from octavo.frontend.plugins import vllm_api
from octavo.frontend.plugins.adapters import PluginReasoning, PluginToolParser
from octavo.frontend.plugins.vllm_functions import PLUGIN
from octavo.frontend.plugins.vllm_modules import has_vllm, vllm_modules
from octavo.frontend.reasoning.registry import register_reasoning_parser
from octavo.frontend.tools.registry import register_tool_parser
from octavo.protocol.errors import ConfigError
from octavo.protocol.module_files import NotAPythonFileError, load_module_of_file

_METHODS = {
    "tool": ("extract_tool_calls", "extract_tool_calls_streaming"),
    "reasoning": ("extract_reasoning", "extract_reasoning_streaming"),
}
"""Methods that a parser must have, by kind."""


def load_plugin(file: str, flag: str) -> None:
    """Run a Python file that registers parsers with octavo's functions or with vLLM's managers.

    Args:
        file: its path.
        flag: the flag that names it, for errors.

    Raises:
        ConfigError: the file cannot be read, or its code fails.
    """
    is_real = has_vllm()
    try:
        with contextlib.nullcontext() if is_real else vllm_modules():
            before = _registered() if is_real else {}
            module = load_module_of_file(file, PLUGIN)
            _register(before, _registered() if is_real else _registered_here(), module)
    except NotAPythonFileError as error:
        raise ConfigError(f"{flag}: {error}") from None
    except ConfigError:
        raise
    except Exception as error:
        hint = "docs/plugins.md lists what plugins for vLLM can import" if isinstance(error, ImportError) else ""
        raise ConfigError(f"{flag} {file}: {type(error).__name__}: {error}", hint=hint) from error


Registered = Mapping[tuple[str, str], Any]
"""Classes, or (module, name) of a class, by kind ("tool", "reasoning") and name."""


def _registered_here() -> Registered:
    """Return and clear the registrations with octavo's replacements of vLLM's managers."""
    found: dict[tuple[str, str], Any] = {}
    managers = {"tool": vllm_api.ToolParserManager, "reasoning": vllm_api.ReasoningParserManager}
    for kind, manager in managers.items():
        found |= {(kind, name): parser for name, parser in {**manager.lazy, **manager.found}.items()}
        manager.lazy.clear()
        manager.found.clear()
    return found


def _registered() -> Registered:
    """Return the registrations with vLLM's own managers, for any release of vLLM."""
    tools = _member("ToolParserManager", "vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
    reasoning = _member("ReasoningParserManager", "vllm.reasoning")
    found: dict[tuple[str, str], Any] = {}
    for kind, manager, attribute in (("tool", tools, "tool_parsers"), ("reasoning", reasoning, "reasoning_parsers")):
        parsers = {**getattr(manager, "lazy_parsers", {}), **getattr(manager, attribute)}
        found |= {(kind, name): parser for name, parser in parsers.items()}
    return found


def _member(name: str, *modules: str) -> Any:
    """Return an object by its name from the first of these modules that exists."""
    for module in modules[:-1]:
        if importlib.util.find_spec(module) is not None:
            return getattr(importlib.import_module(module), name)
    return getattr(importlib.import_module(modules[-1]), name)


def _register(before: Registered, after: Registered, module: ModuleType) -> None:
    for (kind, name), parser in after.items():
        if before.get((kind, name)) == parser:
            continue
        if isinstance(parser, tuple):
            path, class_name = parser
            parser = getattr(module, class_name, None) or getattr(importlib.import_module(path), class_name)
        if missing := [method for method in _METHODS[kind] if not callable(getattr(parser, method, None))]:
            raise TypeError(f"the {kind} parser {name!r} has no method {' and no method '.join(missing)}")
        if kind == "tool":
            register_tool_parser(name)(PluginToolParser.of(name, parser))
        else:
            register_reasoning_parser(name, PluginReasoning.of(name, parser))
