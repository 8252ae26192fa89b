"""`render_config_docs`: the configuration tree as the page `docs/config.md`."""

from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

from octavo.protocol.config.server import ServerConfig
from octavo.protocol.config.sources import FieldInfo, engine_branches, engine_fields, server_fields, spelled

_INTRODUCTION = """\
# Configuration

Every setting is a flag of `octavo serve`, a key of its `--config` file (YAML; dashes or underscores) and, but for those
of the HTTP server, a keyword argument of `LLM` and `AsyncClient.launch`. The command line wins over the file. Whole
numbers may have a unit: `32k` is 32 000, `32K` is 32 768, `4G` is 4 x 2^30. Switches have a form with `--no-`. A list
is given as several words after the flag or by repeating it.

The environment is about the machine: `OCTAVO_CACHE` (downloaded and converted models, packed weights and compiled
kernels, default `~/.cache/octavo`), `CXX` (the C++ compiler of the kernels; default: g++, clang++, c++ or ziglang),
`OCTAVO_LOG_LEVEL`, `OCTAVO_API_KEY` (the same as `--api-key`), `OCTAVO_CHECK=1` (the core verifies its state after
every step), `HF_HUB_OFFLINE=1` (never ask the model hub).

Exit codes of `octavo`: 0 done, also after Ctrl-C on a server that was ready; 1 failed, the last line says why; 2 the
command line is wrong; 128 + N ended by signal N before it was ready.

This page is made by `scripts/docs` from `protocol/config/`.
"""


def render_config_docs() -> str:
    """Return `docs/config.md`."""
    parts = [_INTRODUCTION]
    for branch, struct in engine_branches().items():
        parts += _section(struct, [info for info in engine_fields() if info.branch == branch])
    parts += _section(ServerConfig, server_fields())
    return "\n".join(parts)


def _section(struct: type[msgspec.Struct], fields: Iterable[FieldInfo]) -> list[str]:
    title = (struct.__doc__ or "").split("\n")[0].rstrip(".")
    rows = [f"| {_flags(info)} | {_type_name(info.type)} | {_default(info)} | {info.description} |" for info in fields]
    return [f"## {title}", "", "| flag | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]


def _flags(info: FieldInfo) -> str:
    flags = [*(spelled(name) for name in (info.name, *info.aliases)), *info.short]
    return ", ".join(f"`{flag}`" for flag in flags)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "JSON object"
    names = {int: "whole number", float: "number", str: "text", bool: "switch"}
    if kind in names:
        return names[kind]
    # An object is written as text on the command line; that it is one says it all.
    parts = [part for part in get_args(kind) if part is not NoneType]
    if objects := [part for part in parts if get_origin(part) is dict]:
        parts = objects
    return " or ".join(_type_name(part) for part in parts)


def _default(info: FieldInfo) -> str:
    if info.default is msgspec.NODEFAULT:
        return "required"
    if info.default is None:
        return ""
    if isinstance(info.default, bool):
        return "on" if info.default else "off"
    return f"`{info.default}`"
