"""Builds the configuration tree from flat `{flag: value}` settings.

The command line, a YAML file and `LLM(**kwargs)` all use this module, so they accept the same names and give the same
errors. A name belongs to exactly one branch of the tree.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from octavo.protocol.config.engine import EngineConfig
from octavo.protocol.config.server import ServerConfig
from octavo.protocol.config.vllm_compat import translate_vllm_settings
from octavo.protocol.errors import ConfigError

Config = TypeVar("Config", EngineConfig, ServerConfig)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class FieldInfo(msgspec.Struct, frozen=True):
    """One configuration field, as shown in `--help` and `docs/config.md`."""

    name: str
    branch: str
    """"model", "cache", ...; "server" for the HTTP side."""
    type: Any
    default: Any
    """`msgspec.NODEFAULT` if the field is required."""
    description: str
    aliases: tuple[str, ...] = ()
    """Other names of the field with the same meaning."""
    short: tuple[str, ...] = ()
    """Short spellings of its flag: `-tp`."""

    @property
    def flag(self) -> str:
        """The command line's spelling: `--max-num-seqs`."""
        return spelled(self.name)


def spelled(name: str) -> str:
    """Return a setting's name as spelled on the command line."""
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int:
    """Parse a number with an optional unit: `32k` = 32 000, `32K` = 32 768, `1.5G` = 1.5 x 2^30.

    Raises:
        ValueError: the text is not such a number.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"not a size: {text!r}")
    unit = match[2]
    size = float(match[1]) * (_DECIMAL.get(unit) or _BINARY.get(unit) or 1)
    if not size.is_integer():
        raise ValueError(f"not a whole number: {text!r}")
    return int(size)


@functools.cache
def engine_branches() -> Mapping[str, type[msgspec.Struct]]:
    """Return the branches of `EngineConfig` by name."""
    return {name: kind for name, kind in get_type_hints(EngineConfig).items() if isinstance(kind, type)}


def engine_fields() -> Iterator[FieldInfo]:
    """Yield every field of the engine's tree, in order."""
    for branch, struct in engine_branches().items():
        yield from struct_fields(branch, struct)


def server_fields() -> Iterator[FieldInfo]:
    """Yield every field of `ServerConfig`, in order."""
    yield from struct_fields("server", ServerConfig)


@functools.cache
def struct_fields(branch: str, struct: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """Return the fields of one struct with their plain types and descriptions."""
    annotated = get_type_hints(struct, include_extras=True)
    plain = get_type_hints(struct)
    found = []
    for info in msgspec.structs.fields(struct):
        metas = getattr(annotated[info.name], "__metadata__", ())
        description = next((meta.description for meta in metas if meta.description), "")
        extra: dict[str, Any] = next((meta.extra for meta in metas if meta.extra), {})
        names = extra.get("aliases", ()), extra.get("short", ())
        found.append(FieldInfo(info.name, branch, plain[info.name], info.default, description, *names))
    return tuple(found)


def own_names(settings: Mapping[str, Any], fields: Iterable[FieldInfo]) -> dict[str, Any]:
    """Return settings with every alias replaced by the field's own name.

    Raises:
        ConfigError: a field is given under two names.
    """
    names = {alias: info.name for info in fields for alias in info.aliases}
    result: dict[str, Any] = {}
    for name, value in settings.items():
        own = names.get(name, name)
        if own in result:
            raise ConfigError(f"{name} and another name of {own} are both given")
        result[own] = value
    return result


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Build the engine's configuration from flat settings.

    Raises:
        ConfigError: a name is unknown, a vLLM setting is not supported, or a value has the wrong type or is out of
            bounds. The message names it.
    """
    homes = {info.name: info.branch for info in engine_fields()}
    settings = translate_vllm_settings(settings)
    tree: dict[str, dict[str, Any]] = {branch: {} for branch in engine_branches()}
    for name, value in own_names(settings, engine_fields()).items():
        if name not in homes:
            if name in ServerConfig.__struct_fields__:
                message = f"{name} is a setting of the server and not of an engine"
                raise ConfigError(message, hint="use octavo serve")
            raise ConfigError(f"unknown setting {name!r}", hint=_suggestion(name, homes))
        tree[homes[name]][name] = value
    return _convert(tree, EngineConfig)


def server_config(settings: Mapping[str, Any]) -> ServerConfig:
    """Build the HTTP server's configuration from flat settings.

    Raises:
        ConfigError: see `engine_config`.
    """
    return _convert(own_names(settings, server_fields()), ServerConfig)


def _convert(tree: dict[str, Any], struct: type[Config]) -> Config:
    try:
        return msgspec.convert(tree, struct)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").rpartition(".")[2]
        raise ConfigError(f"{name}: {what}" if name else what, hint=_choices(name)) from error


def _choices(name: str) -> str:
    """Return the valid values of a setting, if they are a list of words."""
    kind = next((info.type for info in (*engine_fields(), *server_fields()) if info.name == name), None)
    parts = [kind] if get_origin(kind) is Literal else [part for part in get_args(kind) if part is not NoneType]
    if parts and all(get_origin(part) is Literal for part in parts):
        return "one of " + ", ".join(word for part in parts for word in get_args(part))
    return "see octavo serve --help"


def _suggestion(name: str, known: Mapping[str, str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "octavo serve --help lists every setting"
